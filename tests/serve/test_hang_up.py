"""Clients that hang up: their texts no longer count, at once, whatever they have asked for."""

import asyncio
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import reference, saved
from live import Live, live, slow_norm
from torch import Tensor, nn

import minigpt
from minigpt.generation import parse_settings
from minigpt.generation.row import TextCodec
from minigpt.serve.jobs import Comparison, Job, RequestRow
from minigpt.serve.protocol import CompletionRequest, RefusalError
from minigpt.serve.scheduler import Scheduler

httpx = pytest.importorskip("httpx")

AT_ONCE = 0.3  # seconds; a step of the slow model takes a tenth of one
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset
BODIES: dict[str, tuple[str, dict[str, Any]]] = {  # what waits, and how many texts of it count as waiting
    "whole": ("/v1/completions", {"prompt": "The dog"}),
    "stream": ("/v1/completions", {"prompt": "The dog", "stream": True}),
    "prompts": ("/v1/completions", {"prompt": ["The dog", "A cat", "Tom"]}),
    "n": ("/v1/completions", {"prompt": "The dog", "n": 2, "stream": True}),
    "long": ("/v1/completions", {"prompt": "The dog ran. " * 20}),
    "logprobs": ("/v1/completions", {"prompt": "The dog", "logprobs": 3, "echo": True}),
    "compare": ("/compare", {"prompt": "The dog", "models": ["demo", "demo"]}),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server whose texts take many seconds."""
    norm = slow_norm(tmp_path_factory.mktemp("norm"), 0.01)
    with live("--norm", norm, "--grace", "1") as server:
        yield server


def ask(server: Live, path: str, **fields: Any) -> socket.socket:
    model = {} if "models" in fields else {"model": "demo"}
    body = json.dumps(model | fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    connection.sendall(head.encode() + b"\r\n\r\n" + body)
    return connection


def counted(server: Live, name: str) -> int:
    return int(float(re.findall(rf"^minigpt_texts_{name} (.*)", httpx.get(f"{server.url}/metrics").text, re.M)[0]))


def wait_until(server: Live, name: str, least: int, most: int, seconds: float = 30.0) -> int:
    """Return the number of texts when it is within bounds, or when the time is over."""
    end = time.monotonic() + seconds
    while not least <= (count := counted(server, name)) <= most and time.monotonic() < end:
        time.sleep(0.02)
    return count


def hang_up(connections: list[socket.socket], resets: bool) -> None:
    for connection in connections:
        if resets:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        connection.close()


@pytest.mark.thorough
@pytest.mark.parametrize("resets", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("kind", BODIES)
def test_texts_whose_clients_are_gone_wait_no_longer(server: Live, kind: str, resets: bool) -> None:
    path, fields = BODIES[kind]
    texts = 100 // (fields.get("n", 1) * (len(fields["prompt"]) if isinstance(fields["prompt"], list) else 1))
    writing = [ask(server, "/v1/completions", prompt="Once", max_tokens=200, eos_token_id=[]) for _ in range(16)]
    assert wait_until(server, "writing", 16, 16) == 16
    waiting = [ask(server, path, max_tokens=100, eos_token_id=[], **fields) for _ in range(texts)]
    name = "writing" if kind == "compare" else "waiting"  # comparisons have places of their own
    assert wait_until(server, name, 95, 200) >= 95
    hang_up(waiting, resets)
    left = wait_until(server, name, 0, 16 * (kind == "compare"), AT_ONCE)
    print(f"{left} of {texts} requests still count after {AT_ONCE} s")
    assert left == 16 * (kind == "compare")
    hang_up(writing, resets)
    assert wait_until(server, "writing", 0, 0) == 0


@pytest.mark.thorough
def test_clients_that_stay_are_not_refused_for_those_that_went(server: Live) -> None:
    """200 clients at a time cannot fill a queue of 256, however often half of them hang up and come again."""

    def client(number: int) -> list[int]:
        statuses = []
        for turn in range(4):
            connection = ask(server, "/v1/completions", prompt="Once", max_tokens=2, stream=number % 3 == 0)
            if (number + turn) % 2:
                time.sleep(0.05)
                hang_up([connection], resets=number % 5 == 0)
            else:
                statuses.append(int(connection.recv(65536).split(b" ", 2)[1]))
                connection.close()
        return statuses

    with ThreadPoolExecutor(200) as clients:
        statuses = [status for some in clients.map(client, range(200)) for status in some]
    print(f"{statuses.count(429)} of {len(statuses)} were refused")
    assert set(statuses) == {200}


class Held(nn.LayerNorm):
    """A norm that waits for ``go``."""

    go = threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        assert self.go.wait(10)
        return super().forward(x)


def test_a_place_in_the_queue_is_free_as_soon_as_its_client_is_gone(tmp_path: Path) -> None:
    """Also while a step goes on, and with requests for several texts, and comparisons."""
    Held.go.set()  # for the trial of a norm
    model = minigpt.from_pretrained(saved(reference(n_layer=1), tmp_path), device="cpu", norm=Held)
    Held.go.clear()
    settings = parse_settings(max_new_tokens=3)
    codec: TextCodec = minigpt.Tokenizer.from_pretrained("demo")

    def row() -> RequestRow:
        return RequestRow([5, 6], settings, (), codec)

    def job(texts: int) -> Job:
        return Job(CompletionRequest(model="m", prompt="a"), [row() for _ in range(texts)])

    async def run() -> None:
        scheduler = Scheduler({"m": model}, places=2, max_queue=6)
        written, comparison = job(2), Comparison((model, model), (row(), row()), 1, str)
        scheduler.submit(written, 2, "m")
        while len(scheduler.lanes["m"].rows) < 2:  # the step waits in the norm from here on
            await asyncio.sleep(0.001)
        waiting = [job(1), job(5), job(1)]
        for each in waiting:
            scheduler.submit(each, len(each.waiting), "m")
        scheduler.submit(comparison, 1)
        assert (scheduler.count_waiting, scheduler.count_writing) == (7, 3)
        with pytest.raises(RefusalError, match="5 texts wait, of 6"):  # one request counts as places at most
            scheduler.submit(job(2), 2, "m")
        for gone in (waiting[1], waiting[2], comparison, written):
            gone.channel.disconnected = True
        assert (scheduler.count_waiting, scheduler.count_writing) == (1, 0)
        scheduler.submit(last := job(4), 4, "m")
        Held.go.set()
        while scheduler.has_work:
            await asyncio.sleep(0.001)
        scheduler.stop()
        assert not last.waiting
        assert waiting[1].waiting, "nobody wants these"

    torch.manual_seed(0)
    asyncio.run(run())
