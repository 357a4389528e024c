"""What comes over a socket: clients of HTTP/1.0 and of HTTP/2, several requests at once, heads that are no request."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from checkpoints import tiny_bpe
from helpers import small_model

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

import minigpt
from minigpt.serve.run import listen, server_of

JSON = b"Host: localhost\r\nContent-Type: application/json\r\n"
BODY = {"model": "small", "prompt": "the dog", "max_tokens": 5, "temperature": 0, "eos_token_id": []}
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A server in a thread."""
    model = small_model(n_positions=64, vocab_size=300)
    app = minigpt.serve.app({"small": model}, tokenizer=minigpt.Tokenizer(tiny_bpe(300)))
    server = server_of(app, grace=5)
    with listen("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield listening.getsockname()[1]
        server.should_exit = True
        thread.join()


def post(body: dict[str, Any], head: bytes = JSON, version: bytes = b"1.1") -> bytes:
    content = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/%b\r\n%bContent-Length: %d\r\n\r\n%b" % (version, head, len(content), content)


def get(path: bytes, method: bytes = b"GET", head: bytes = b"Host: localhost\r\n") -> bytes:
    return b"%b %b HTTP/1.1\r\n%bConnection: close\r\n\r\n" % (method, path, head)


def exchange(port: int, *requests: bytes) -> bytes:
    """Send requests at once, and read until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(b"".join(requests))
        received = b""
        while piece := connection.recv(65536):
            received += piece
        return received


def test_an_offer_of_http_2_is_ignored(port: int, caplog: pytest.LogCaptureFixture) -> None:
    """Java's HttpClient makes it with every request."""
    head, _, body = exchange(port, post(BODY, JSON + H2C), get(b"/health")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b'"completion_tokens":5' in body
    assert body.endswith(b'{"status":"ok"}'), "the connection goes on"
    assert not caplog.records


def test_a_client_of_http_1_0_gets_no_chunks(port: int) -> None:
    head, _, content = exchange(port, post(BODY | {"stream": True}, version=b"1.0")).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert content.startswith(b"data: {")
    assert content.endswith(b"data: [DONE]\n\n")


def test_requests_that_come_together_are_answered_in_turn(port: int) -> None:
    answers = exchange(port, post(BODY), post(BODY | {"max_tokens": 3}), get(b"/health"))
    assert answers.count(b"HTTP/1.1 200") == 3
    assert answers.index(b'"completion_tokens":5') < answers.index(b'"completion_tokens":3')


def test_clients_that_go_leave_no_word_in_the_log(port: int, caplog: pytest.LogCaptureFixture) -> None:
    for requests in ([post(BODY)] * 3, [post(BODY | {"stream": True})] * 3, [post(BODY)[:-1]], [get(b"/health")[:9]]):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(b"".join(requests))
    assert exchange(port, get(b"/health")).startswith(b"HTTP/1.1 200")
    time.sleep(0.3)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("path", [b"/", b"/health", b"/v1/models", b"/v1/models/small", b"/metrics", b"/openapi.json"])
def test_head_is_answered_as_get_without_the_body(port: int, path: bytes) -> None:
    of_get, _, body = exchange(port, get(path)).partition(b"\r\n\r\n")
    of_head, _, nothing = exchange(port, get(path, b"HEAD")).partition(b"\r\n\r\n")
    status, *fields = of_head.split(b"\r\n")
    assert status == of_get.split(b"\r\n")[0] == b"HTTP/1.1 200 OK"
    assert {field.partition(b":")[0] for field in fields} == {
        field.partition(b":")[0] for field in of_get.split(b"\r\n")[1:]
    }
    assert body
    assert nothing == b""


@pytest.mark.parametrize(
    "head",
    [
        b"Host: evil.example\r\nHost: localhost\r\n", b"Host: localhost\r\nHost: evil.example\r\n",
        b"Host: localhost\r\nno field\r\n", b"",
    ],
)  # fmt: skip
def test_a_head_that_is_no_request_is_refused(port: int, head: bytes) -> None:
    assert exchange(port, get(b"/health", head=head)).startswith(b"HTTP/1.1 400")


def test_a_head_has_a_limit(port: int) -> None:
    def answer_to(size: int) -> bytes:
        with contextlib.suppress(ConnectionError):  # a reset may overtake the answer
            return exchange(port, get(b"/health", head=b"Host: localhost\r\nX-Long: %b\r\n" % (b"a" * size)))
        return b"HTTP/1.1 400"

    assert answer_to(60_000).startswith(b"HTTP/1.1 200")
    assert answer_to(2**18).startswith(b"HTTP/1.1 400")


def test_an_answer_before_the_body_leaves_the_connection_to_the_next_request(port: int) -> None:
    refused = post(BODY, JSON + b"Origin: https://evil.example\r\n")
    answers = exchange(port, refused, get(b"/health"))
    assert answers.startswith(b"HTTP/1.1 403")
    assert answers.endswith(b'{"status":"ok"}')
