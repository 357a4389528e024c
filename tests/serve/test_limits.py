"""Clients that send too much, too slowly, or read nothing: each gets its answer or loses its connection in time."""

import http.client
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from live import Live, live

httpx = pytest.importorskip("httpx")
pytestmark = pytest.mark.thorough
SHORT = """
from minigpt.serve import run
run.SEND_SECONDS = run.READ_SECONDS = 2
run.MAX_CONNECTIONS = 200
"""
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(before=SHORT) as server:
        yield server


def connect(server: Live, *parts: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    for part in parts:
        connection.sendall(part)
    return connection


def seconds_until_closed(connections: list[socket.socket]) -> float:
    """Read each connection to its end, and return how long the last took."""
    began = time.monotonic()
    for connection in connections:
        try:
            while connection.recv(65536):
                pass
        except ConnectionResetError:
            pass
        connection.close()
    return time.monotonic() - began


@pytest.mark.parametrize("megabytes", [3, 20])
@pytest.mark.parametrize("connection", ["keep-alive", "close"])
def test_a_body_above_the_limit_gets_its_answer(server: Live, megabytes: int, connection: str) -> None:
    body = b'{"model": "demo", "prompt": "' + b"a" * (megabytes * 2**20) + b'"}'

    def refused(_: int) -> tuple[int, str]:
        headers = {"Connection": connection}
        answer = httpx.post(f"{server.url}/v1/completions", content=body, headers=headers, timeout=60)
        return answer.status_code, answer.json()["error"]["code"]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(refused, range(12))) == [(413, "too_large")] * 12


def test_a_body_without_end_loses_its_connection(server: Live) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with pytest.raises(OSError):  # noqa: PT011 (reset or broken pipe)
        connection.request("POST", "/v1/completions", (bytes(2**20) for _ in range(500)), encode_chunked=True)


def test_150_connections_that_never_finish_their_requests_are_closed(server: Live) -> None:
    started = [b"", b"P", HEAD + b"X-Slow: ", HEAD + b"Content-Length: 100\r\n\r\n{"]
    waiting = [connect(server, started[i % 4]) for i in range(100)]
    dripping = [connect(server, HEAD) for _ in range(50)]
    answered = connect(server, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")  # and then a second, slow head
    assert answered.recv(1000).startswith(b"HTTP/1.1 200 ")
    began, alive = time.monotonic(), [*dripping, answered]
    while alive and time.monotonic() < began + 30:
        for connection in list(alive):
            try:
                connection.sendall(b"X")
            except OSError:
                alive.remove(connection)
        time.sleep(0.1)
    assert not alive
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert seconds_until_closed([*waiting, *dripping, answered]) < 20


def test_a_request_that_ends_in_its_middle_is_dropped(server: Live) -> None:
    for parts in ([], [HEAD], [HEAD + b"Content-Length: 100\r\n\r\n{"]):
        with connect(server, *parts) as connection:
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(100) == b""


def test_idle_connections_of_one_client_keep_nobody_out(server: Live) -> None:
    before, idle, most = settled(server), list[socket.socket](), 0
    for _ in range(10):
        idle += [connect(server) for _ in range(30)]
        assert httpx.get(f"{server.url}/health").status_code == 200
        most = max(most, sockets(server) - before)
    assert 100 < most <= 201, "200, and the one that is accepted"
    assert all(connection.recv(1) == b"" for connection in idle[:100])
    for connection in idle:
        connection.close()


def test_requests_in_progress_are_not_closed_for_others(server: Live) -> None:
    body = {"model": "demo", "prompt": "The dog", "max_tokens": 60000, "overflow": "slide", "eos_token_id": []}
    data = json.dumps(body).encode()
    connections = [connect(server, HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data) for _ in range(200)]
    time.sleep(1)
    later = httpx.get(f"{server.url}/v1/models")
    assert (later.status_code, later.json()["error"]["code"]) == (503, "overloaded")
    for connection in connections:
        connection.close()
    until(lambda: "minigpt_texts_writing 0.0" in httpx.get(f"{server.url}/metrics").text)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_reads_nothing_loses_its_connection(server: Live, stream: bool) -> None:
    body = {"model": "demo", "prompt": "a", "n": 16, "logprobs": 100, "max_tokens": 200, "eos_token_id": []}
    data = json.dumps(body | {"stream": stream}).encode()
    before = settled(server)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        until(lambda: sockets(server) == before + 1)
        until(lambda: sockets(server) == before)
    assert "minigpt_texts_writing 0.0" in httpx.get(f"{server.url}/metrics").text


def sockets(server: Live) -> int:
    """How many sockets the server has open."""
    open_files = Path(f"/proc/{server.process.pid}/fd").iterdir()
    return sum(os.path.lexists(file) and os.readlink(file).startswith("socket:") for file in open_files)


def settled(server: Live) -> int:
    """How many sockets remain when the connections of earlier tests are closed."""
    time.sleep(8)  # longer than an idle connection is kept
    return sockets(server)


def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
