"""A server as a process: how it starts and ends, who may reach it, and clients that misbehave."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from live import Live, live, slow_norm

httpx = pytest.importorskip("httpx")
pytestmark = pytest.mark.thorough


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Live]:
    """A server whose texts take some seconds."""
    with live("--norm", slow_norm(tmp_path, 0.002), "--grace", "20") as server:  # a step takes 18 ms at least
        yield server


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": "The dog", "eos_token_id": [], **fields}


def written(server: Live) -> tuple[float, float]:
    """How many texts are being written, and how many tokens have been."""
    values = dict(line.rpartition(" ")[::2] for line in httpx.get(f"{server.url}/metrics").text.splitlines())
    return float(values["minigpt_texts_writing"]), float(values.get('minigpt_generated_tokens_total{model="demo"}', 0))


def refused(*options: str, **environment: str) -> str:
    command = [sys.executable, "-m", "minigpt", "serve", "--port", "0", *options]
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=120)
    assert ran.returncode == 2
    assert ran.stdout == ""
    return ran.stderr


def test_the_curl_line_works_when_pasted_and_sigterm_alone_ends_it() -> None:
    with live(MINIGPT_API_KEY="it's right") as server:
        answer = subprocess.run(
            ["bash", "-c", server.curl + " -s"], capture_output=True, text=True, timeout=60,
            env={**os.environ, "MINIGPT_API_KEY": "it's right"},
        )  # fmt: skip
        assert json.loads(answer.stdout)["choices"][0]["text"]
        server.process.send_signal(signal.SIGPIPE)  # what the system sends when a client has gone
        assert httpx.get(f"{server.url}/").status_code == 200
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        assert shlex.split(server.curl)[1].startswith(server.url)
        assert "right" not in server.curl
    assert server.process.returncode == 0


def test_what_cannot_be_served_is_one_line() -> None:
    assert "needs --api-key" in refused("--host", "0.0.0.0")
    assert "empty" in refused("--api-key", "")
    assert "--grace must be" in refused("--grace", "-1")
    assert "unknown norm" in refused("--norm", "nobody")
    assert "given twice" in refused("--norm", "fused", "--norm", "fused")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "cannot listen on 127.0.0.1" in refused("--port", str(taken.getsockname()[1]))


def test_a_text_whose_client_hangs_up_is_dropped_within_a_step(slow: Live) -> None:
    for stream in (True, False):
        before = written(slow)[1]
        client = socket.create_connection(("127.0.0.1", slow.port))
        data = json.dumps(body(max_tokens=250, stream=stream)).encode()
        head = ("POST /v1/completions HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json",
                f"Content-Length: {len(data)}", "\r\n")  # fmt: skip
        client.sendall("\r\n".join(head).encode() + data)
        deadline = time.monotonic() + 20
        while written(slow)[1] < before + 5 and time.monotonic() < deadline:
            time.sleep(0.02)
        client.close()
        at_once = written(slow)[1]
        time.sleep(0.5)
        writing, after = written(slow)
        assert writing == 0
        assert at_once <= after <= at_once + 3, f"{after - at_once} tokens after the client was gone"
        assert after < before + 200


def test_sigterm_lets_texts_finish_and_takes_no_more(slow: Live) -> None:
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(httpx.post, f"{slow.url}/v1/completions", json=body(max_tokens=100), timeout=60)
        while not written(slow)[0]:
            time.sleep(0.02)
        slow.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{slow.url}/health")
        assert answer.result().json()["usage"]["completion_tokens"] == 100
    assert slow.process.wait(30) == 0


@pytest.mark.parametrize("pause", [0.003, 1.0])
def test_when_the_grace_is_over_every_client_is_told_and_the_log_is_clean(tmp_path: Path, pause: float) -> None:
    """Streams, whole answers, comparisons, texts that wait for a place, and a body that does not arrive."""
    norm, log = slow_norm(tmp_path, pause), tmp_path / "log"
    with log.open("w") as stderr, live("--norm", norm, "--norm", "fused", "--grace", "1", stderr=stderr) as server:

        def ask(number: int) -> Any:
            post = partial(httpx.post, timeout=60)
            if number % 8 == 7:
                models = ["demo", "demo:fused"]
                return post(f"{server.url}/compare", json={"models": models, "max_tokens": 250, "eos_token_id": []})
            stream = number % 2 == 0
            return post(f"{server.url}/v1/completions", json=body(max_tokens=250, stream=stream, n=1 + number % 3))

        with ThreadPoolExecutor(24) as pool:
            pending = [pool.submit(ask, number) for number in range(24)]
            unsent = socket.create_connection(("127.0.0.1", server.port))
            unsent.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n"
                           b"Content-Type: application/json\r\n\r\n{")  # fmt: skip
            while not written(server)[0]:
                time.sleep(0.02)
            time.sleep(0.5)
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(30) == 0
            took = time.monotonic() - began
            answers = [each.result() for each in pending]
    for answer in answers:
        is_stream = answer.status_code == 200
        last = answer.text.removesuffix("\n\n").split("\n\n")[-1].removeprefix("data: ") if is_stream else answer.text
        assert answer.status_code in (200, 503)
        assert json.loads(last)["error"]["code"] == "shutting_down"
    with unsent:
        assert b" 503 " in unsent.recv(65536)
    assert 1 <= took < 2
    assert "Traceback" not in log.read_text()


def test_threads_wait_passively_from_the_start(tmp_path: Path) -> None:
    """GNU OpenMP reads its variables when torch is loaded."""
    with (tmp_path / "log").open("w") as log, live(stderr=log, OMP_DISPLAY_ENV="VERBOSE") as server:
        assert server.url
    assert "GOMP_SPINCOUNT = '0'" in (tmp_path / "log").read_text()


def test_a_signal_is_never_lost() -> None:
    """Also between the first lines and the server's own handlers."""
    for pause in (0, 0.01, 0.03):
        with live() as server:
            time.sleep(pause)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(20) == 0


def test_a_second_ctrl_c_tells_every_client_at_once(tmp_path: Path) -> None:
    norm, log = slow_norm(tmp_path, 0.01), tmp_path / "log"
    with log.open("w") as stderr, live("--norm", norm, stderr=stderr) as server, ThreadPoolExecutor(3) as pool:
        post = partial(httpx.post, f"{server.url}/v1/completions", timeout=60)
        pending = [pool.submit(post, json=body(max_tokens=250, stream=stream)) for stream in (True, False, False)]
        while not written(server)[0]:
            time.sleep(0.02)
        time.sleep(0.3)
        for _ in range(2):
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        assert server.process.wait(5) == 0
        answers = [each.result() for each in pending]
    assert ["shutting_down" in answer.text for answer in answers] == [True] * 3
    assert not log.read_text()
