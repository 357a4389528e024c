"""The server under load, in turns with ``complete`` on the same texts, and with other servers on the same weights."""

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import string
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from minigpt.bench.llama import GGML_TYPES, write_gguf
from minigpt.checkpoint import from_pretrained, save_pretrained
from minigpt.config import GPT2Config
from minigpt.engine import GPT2
from minigpt.errors import ConfigError, MiniGPTError
from minigpt.measure.environment import environment
from minigpt.measure.steps import Progress, Steps
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
        clients: how many ask at once. Each sends its next request when it has the last answer.
        requests: of each client, in a round.
        prompt_characters: of each prompt, which is random letters.
        kind: "float32", "bfloat16", "float16", "float64" or "int8". transformers has no int8 and computes in float32.
        new_tokens: of each text. Every contestant is greedy, and goes on after an end of text.
        against: other servers: "transformers" or "llama-server".

    Raises:
        ConfigError: if a number is below 1, or a server is unknown, absent, or does not compute in ``kind``.
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
        for name in ("clients", "requests", "prompt_characters", "new_tokens", "repeats"):
            if (given := getattr(self, name)) < 1:
                raise ConfigError(f"{name} must be 1 or more, got {given}")
        for name in self.against:
            if name not in NAMES:
                raise ConfigError(f"unknown server {name!r}; known are {', '.join(NAMES)}")
        if "llama-server" in self.against:
            if self.kind not in GGML_TYPES:
                raise ConfigError(f"llama-server computes in {', '.join(GGML_TYPES)}, got {self.kind}")
            if llama_server() is None:
                raise ConfigError("llama-server is not on the PATH; put it there, or set LLAMA_SERVER to its path")

    @property
    def prompts(self) -> list[str]:
        chance = random.Random(0)
        letters = string.ascii_lowercase + " "
        size = self.prompt_characters
        return ["".join(chance.choices(letters, k=size)) for _ in range(self.clients * self.requests)]


@dataclasses.dataclass(frozen=True)
class Round:
    """One round of a contestant: how long it took, for how many tokens, and how long each text's first token took."""

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
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        begin("preparing the checkpoint")
        _prepare(plan, folder)
        begin("starting complete")
        contestants: dict[str, Any] = {"complete": stack.enter_context(_complete(plan, folder))}
        for server in ("minigpt", *plan.against):
            begin(f"starting {NAMES[server]}")
            port = stack.enter_context(_server(_command(server, plan, folder)))
            fields: dict[str, Any] = {"model": str(folder) if server == "transformers" else folder.name}
            if server == "llama-server":
                fields |= {"ignore_eos": True, "cache_prompt": False}
            for how in ("", WHOLE):
                contestants[NAMES[server] + how] = _Load(plan, port, fields, streams=not how)
        for contestant in contestants.values():
            contestant()  # not timed: compilers, caches
        found: dict[str, list[Round]] = {name: [] for name in contestants}
        for number in range(plan.repeats):
            begin(f"round {number + 1} of {plan.repeats}")
            for name, contestant in contestants.items():
                found[name].append(contestant())
    speeds = {name: statistics.median(one.tokens / one.seconds for one in rounds) for name, rounds in found.items()}
    ours = {how: speeds[NAMES["minigpt"] + how] for how in ("", WHOLE)}
    return {
        "plan": dataclasses.asdict(plan),
        "environment": environment(torch.get_num_threads(), "fastapi", "uvicorn"),
        "contestants": {name: _described(speeds[name], rounds) for name, rounds in found.items()},
        "share_of_complete": {NAMES["minigpt"] + how: speed / speeds["complete"] for how, speed in ours.items()},
        "times_as_fast_as": {
            NAMES[other] + how: speed / speeds[NAMES[other] + how]
            for other in plan.against
            for how, speed in ours.items()
        },
    }


def _described(tokens_per_second: float, rounds: list[Round]) -> dict[str, Any]:
    waits = sorted(wait for one in rounds for wait in one.first_token_seconds)
    described: dict[str, Any] = {
        "tokens_per_second": tokens_per_second, "seconds": [one.seconds for one in rounds],
        "tokens": [one.tokens for one in rounds],
    }  # fmt: skip
    if waits:
        described["first_token_ms"] = {
            f"p{share}": 1000 * waits[min(len(waits) - 1, int(len(waits) * share / 100))] for share in (50, 90, 99)
        }
    return described


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
        write_gguf(folder, GGML_TYPES[plan.kind])


def _any_tokenizer(vocab_size: int) -> Tokenizer:
    """Return a byte-level tokenizer with this many tokens, in which every byte of a text is a token."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"token{i}" for i in range(vocab_size - 257))]
    backend = tokenizers.Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return Tokenizer(backend)


class _Load:
    """The clients of a server. They are as light as they can be, since they share the processor with it."""

    def __init__(self, plan: ServePlan, port: int, fields: dict[str, Any], streams: bool) -> None:
        self.plan, self.port, self.streams = plan, port, streams
        self.fields = fields | {"max_tokens": plan.new_tokens, "temperature": 0}
        if streams:
            self.fields |= {"stream": True, "stream_options": {"include_usage": True}}

    def __call__(self) -> Round:
        return asyncio.run(self._round())

    async def _round(self) -> Round:
        prompts = self.plan.prompts
        shares = [prompts[i :: self.plan.clients] for i in range(self.plan.clients)]
        began = time.perf_counter()
        found = await asyncio.gather(*map(self._client, shares))
        seconds = time.perf_counter() - began
        waits = [wait for few in found for wait, _ in few if wait is not None]
        return Round(seconds, sum(count for few in found for _, count in few), waits)

    async def _client(self, prompts: list[str]) -> list[tuple[float | None, int]]:
        return [await self._ask(prompt) for prompt in prompts]

    async def _ask(self, prompt: str) -> tuple[float | None, int]:
        """Ask for one text; return the seconds to its first token, if it streams, and the number of its tokens."""
        body = json.dumps(self.fields | {"prompt": prompt}).encode()
        lines = ("POST /v1/completions HTTP/1.1", f"Host: 127.0.0.1:{self.port}", "Content-Type: application/json",
                 "Connection: close", f"Content-Length: {len(body)}", "", "")  # fmt: skip
        began, first, said = time.perf_counter(), None, b""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
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


@contextlib.contextmanager
def _complete(plan: ServePlan, folder: Path) -> Iterator[Any]:
    spec = json.dumps({"folder": str(folder), "kind": plan.kind, "prompts": plan.prompts, "new": plan.new_tokens})
    command = [sys.executable, "-m", "minigpt.bench.complete_worker", spec, str(plan.clients)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **CALM}
    )
    asked, answered = process.stdin, process.stdout
    assert asked is not None
    assert answered is not None

    def run() -> Round:
        asked.write("\n")
        asked.flush()
        line = answered.readline()
        if not line:
            raise MiniGPTError("complete could not be timed: its process has ended")
        seconds, tokens = json.loads(line)
        return Round(seconds, tokens, [])

    try:
        yield run
    finally:
        asked.close()
        answered.close()
        process.wait()


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
def _server(command: list[str]) -> Iterator[int]:
    """Start a server, wait until it is ready, and end it afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, **CALM},
    )  # fmt: skip
    name = " ".join(command[:4])
    try:
        deadline = time.monotonic() + PATIENCE
        while not _is_ready(port):
            if process.poll() is not None:
                raise MiniGPTError(f"{name} ended with status {process.returncode}")
            if time.monotonic() > deadline:
                raise MiniGPTError(f"{name} was not ready within {PATIENCE} s")
            time.sleep(0.2)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False
