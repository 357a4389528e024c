"""The server under load, in turns with ``complete`` on the same texts, and with other servers on the same weights."""

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import re
import shutil
import socket
import statistics
import string
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from minigpt.bench.llama import GGML_TYPES, write_gguf
from minigpt.bench.worker import contestant
from minigpt.checkpoint import save_pretrained
from minigpt.config import GPT2Config
from minigpt.device import environment, in_turns
from minigpt.errors import ConfigError, MiniGPTError
from minigpt.model import GPT2
from minigpt.recipe import from_pretrained
from minigpt.report.steps import Progress, Steps
from minigpt.tokenizer import END_OF_TEXT, Tokenizer

NAMES = {"minigpt": "minigpt serve", "transformers": "transformers serve", "llama-server": "llama-server"}
WHOLE = ", whole answers"
PATIENCE = 180  # seconds for a server to be ready
CALM = {"OMP_WAIT_POLICY": "PASSIVE"}  # for each contestant: threads that wait leave the processor to the clients


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServePlan:
    """What is timed.

    Attributes:
        model: a checkpoint with its tokenizer; None for random weights of the shape of ``preset``.
        kind: "float32", "bfloat16", "float16", "float64" or "int8". transformers has no int8 and computes in float32.
        clients: how many ask at once. Each sends its next request when it has the last answer.
        requests: of each client, in a round.
        prompt_characters: of each prompt, which is random letters.
        new_tokens: of each text. Every contestant is greedy, and goes on after an end of text.
        against: other servers: "transformers" or "llama-server".

    Raises:
        ConfigError: if a server is unknown or absent.
    """

    model: str | None = None
    preset: str = "gpt2"
    kind: str = "float32"
    clients: int = 16
    requests: int = 2
    prompt_characters: int = 32
    new_tokens: int = 48
    repeats: int = 3
    against: tuple[str, ...] = ("transformers",)

    def __post_init__(self) -> None:
        if unknown := set(self.against) - set(NAMES):
            raise ConfigError(f"unknown server {unknown.pop()!r}; known are {', '.join(NAMES)}")
        if "llama-server" in self.against and llama_server() is None:
            raise ConfigError("llama-server is not on the PATH; put it there, or set LLAMA_SERVER to its path")

    @property
    def prompts(self) -> list[str]:
        chance, letters = random.Random(0), string.ascii_lowercase + " "
        return ["".join(chance.choices(letters, k=self.prompt_characters)) for _ in range(self.clients * self.requests)]


class Round(NamedTuple):
    """How long a contestant took for how many tokens, and for the first token of each text that it streamed."""

    seconds: float
    tokens: int
    first_token_seconds: list[float]


def bench_serve(plan: ServePlan, progress: Progress | None = None) -> dict[str, Any]:
    """Time ``complete``, ``minigpt serve`` and the others, in turns; return the report as JSON's own types.

    Each server has two turns in a round: one with answers that stream, one with answers that come whole.

    Raises:
        CheckpointError, ConfigError: if the model cannot be loaded.
        MiniGPTError: if a contestant does not start, or answers with an error.
    """
    begin = Steps(progress, total=3 + len(plan.against) + plan.repeats)
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        folder = Path(place)
        begin("preparing the checkpoint")
        _prepare(plan, folder)
        begin("starting complete")
        how = dict(folder=place, prompts=plan.prompts, kind=plan.kind, places=plan.clients)
        complete = stack.enter_context(contestant("complete", plan.new_tokens, CALM, **how))
        contestants: dict[str, Callable[[], Round]] = {"complete": partial(_completed, plan, complete)}
        for server in ("minigpt", *plan.against):
            begin(f"starting {NAMES[server]}")
            port = stack.enter_context(_running(_command(server, plan, folder)))
            fields: dict[str, Any] = {"model": place if server == "transformers" else folder.name}
            if server == "llama-server":
                fields |= {"ignore_eos": True, "cache_prompt": False}
            streams = {"stream": True, "stream_options": {"include_usage": True}}
            contestants[NAMES[server]] = partial(_loaded, plan, port, fields | streams)
            contestants[NAMES[server] + WHOLE] = partial(_loaded, plan, port, fields)
        for ask in contestants.values():
            ask()  # not timed: compilers, caches
        rounds = in_turns(contestants, (begin(f"round {i + 1} of {plan.repeats}") for i in range(plan.repeats)))
    speeds = {name: statistics.median(one.tokens / one.seconds for one in own) for name, own in rounds.items()}
    ours = {how: speeds[NAMES["minigpt"] + how] for how in ("", WHOLE)}
    return {
        "plan": dataclasses.asdict(plan),
        "environment": environment(torch.get_num_threads(), "fastapi", "uvicorn"),
        "contestants": {name: _described(speeds[name], own) for name, own in rounds.items()},
        "share_of_complete": {NAMES["minigpt"] + how: speed / speeds["complete"] for how, speed in ours.items()},
        "times_as_fast_as": {
            NAMES[other] + how: speed / speeds[NAMES[other] + how]
            for other in plan.against
            for how, speed in ours.items()
        },
    }


def _described(tokens_per_second: float, rounds: list[Round]) -> dict[str, Any]:
    waits = sorted(wait for one in rounds for wait in one.first_token_seconds)
    shares = {f"p{share}": 1000 * waits[len(waits) * share // 100] for share in (50, 90, 99) if waits}
    return {
        "tokens_per_second": tokens_per_second,
        "seconds": [one.seconds for one in rounds],
        "tokens": [one.tokens for one in rounds],
    } | ({"first_token_ms": shares} if shares else {})


def _prepare(plan: ServePlan, folder: Path) -> None:
    """Put a checkpoint and its tokenizer into a folder, from which all contestants load them. No token ends a text."""
    if plan.model is None:
        torch.manual_seed(0)
        model = GPT2(GPT2Config.preset(plan.preset))
        tokenizer = _any_tokenizer(model.config.vocab_size)
    else:
        model = from_pretrained(plan.model, device="cpu", dtype="float32")
        tokenizer = Tokenizer.from_pretrained(plan.model)
    model.config = dataclasses.replace(model.config, eos_token_id=None)
    save_pretrained(model, folder, tokenizer)
    if "llama-server" in plan.against:
        write_gguf(folder, GGML_TYPES.get(plan.kind, plan.kind), tokenizer)


def _any_tokenizer(vocab_size: int) -> Tokenizer:
    """Return a byte-level tokenizer with this many tokens, in which every byte of a text is a token."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"token{i}" for i in range(vocab_size - 257))]
    backend = tokenizers.Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return Tokenizer(backend)


def _completed(plan: ServePlan, ask: Callable[[str], dict[str, Any]]) -> Round:
    return Round(ask("run")["total_ms"] / 1000, len(plan.prompts) * plan.new_tokens, [])


def _loaded(plan: ServePlan, port: int, fields: dict[str, Any]) -> Round:
    """Let the clients ask a server. They are as light as they can be, since they share the processor with it."""
    prompts = plan.prompts

    async def client(number: int) -> list[tuple[float | None, int]]:
        return [await _asked(plan, port, fields | {"prompt": text}) for text in prompts[number :: plan.clients]]

    async def clients() -> list[list[tuple[float | None, int]]]:
        return await asyncio.gather(*map(client, range(plan.clients)))

    began = time.perf_counter()
    answers = [answer for own in asyncio.run(clients()) for answer in own]
    seconds = time.perf_counter() - began
    return Round(seconds, sum(count for _, count in answers), [wait for wait, _ in answers if wait is not None])


async def _asked(plan: ServePlan, port: int, fields: dict[str, Any]) -> tuple[float | None, int]:
    """Ask for one text; return the seconds to its first token, if it streams, and the number of its tokens."""
    body = json.dumps(fields | {"max_tokens": plan.new_tokens, "temperature": 0}).encode()
    lines = ("POST /v1/completions HTTP/1.1", f"Host: 127.0.0.1:{port}", "Content-Type: application/json",
             "Connection: close", f"Content-Length: {len(body)}", "", "")  # fmt: skip
    began, first, said = time.perf_counter(), None, b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write("\r\n".join(lines).encode() + body)
    while part := await reader.read(2**16):
        said += part
        if first is None and b"data: " in said:
            first = time.perf_counter() - began
    writer.close()
    count = re.search(rb'"completion_tokens": ?(\d+)', said)
    if count is None:
        raise MiniGPTError(f"a server answered without tokens: {said[-300:]!r}")
    return first, int(count[1])


def llama_server() -> str | None:
    """Return the path of llama.cpp's server, or None."""
    return os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")


def _command(server: str, plan: ServePlan, folder: Path) -> list[str]:
    """Return the command that starts a server, without its port."""
    if server == "llama-server":
        room = plan.prompt_characters + plan.new_tokens  # a token has a character or more
        sizes = {"-np": plan.clients, "-c": plan.clients * room, "-t": torch.get_num_threads(), "--cache-ram": 0}
        options = [str(word) for pair in sizes.items() for word in pair]
        return [str(llama_server()), "-m", str(folder / f"{GGML_TYPES[plan.kind]}.gguf"), *options, "--cont-batching"]
    if server == "transformers":
        dtype = "float32" if plan.kind == "int8" else plan.kind
        return [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder), "--continuous-batching",
                "--host", "127.0.0.1", "--device", "cpu", "--dtype", dtype]  # fmt: skip
    kind = ["--quantize", "int8"] if plan.kind == "int8" else ["--dtype", plan.kind]
    return [sys.executable, "-m", "minigpt", "serve", "--model", str(folder), "--max-batch", str(plan.clients), *kind]


@contextlib.contextmanager
def _running(command: list[str]) -> Iterator[int]:
    """Start a server, wait until it is ready, and end it afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*command, "--port", str(port)], env={**os.environ, **CALM}, **quiet)
    deadline = time.monotonic() + PATIENCE
    try:
        while not _is_ready(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise MiniGPTError(f"{' '.join(command[:4])} was not ready within {PATIENCE} s, or has ended")
            time.sleep(0.2)
        yield port
    finally:
        process.kill()
        process.wait()


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False
