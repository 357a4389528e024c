"""The server under load, in turns with ``complete`` on the same texts, and with another server on the same weights."""

import asyncio
import contextlib
import dataclasses
import json
import random
import signal
import socket
import statistics
import string
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from minigpt.checkpoint import from_pretrained, save_pretrained
from minigpt.config import GPT2Config
from minigpt.engine import GPT2
from minigpt.errors import ConfigError, MiniGPTError
from minigpt.measure.environment import environment
from minigpt.measure.steps import Progress, Steps
from minigpt.tokenizer import END_OF_TEXT, Tokenizer

OTHERS = ("transformers",)
PATIENCE = 180  # seconds for a server to be ready


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServePlan:
    """What is timed.

    Attributes:
        model: a checkpoint with its tokenizer; None for random weights of the shape of ``preset``.
        clients: that ask at once, each as soon as its last answer is there.
        requests: of each client, in a round.
        prompt_characters: of each prompt, which is random letters.
        against: other servers, of ``OTHERS``.

    Raises:
        ConfigError: if a number is below 1, or a server is unknown.
    """

    model: str | None = None
    preset: str = "gpt2"
    dtype: str = "float32"
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
        if unknown := [name for name in self.against if name not in OTHERS]:
            raise ConfigError(f"unknown server {unknown[0]!r}; known are {', '.join(OTHERS)}")

    @property
    def prompts(self) -> list[str]:
        chance = random.Random(0)
        letters = string.ascii_lowercase + " "
        size = self.prompt_characters
        return ["".join(chance.choices(letters, k=size)) for _ in range(self.clients * self.requests)]


@dataclasses.dataclass(frozen=True)
class Round:
    """One round of a contestant: how long it took, for how many tokens, and each text's wait for its first."""

    seconds: float
    tokens: int
    first_token_seconds: list[float]


def bench_serve(plan: ServePlan, progress: Progress | None = None) -> dict[str, Any]:
    """Time ``complete``, ``minigpt serve`` and the others, in turns; return the report as JSON's own types.

    Raises:
        CheckpointError, ConfigError: if the model cannot be had.
        MiniGPTError: if a contestant does not start, or answers with an error.
    """
    begin = Steps(progress, total=2 + len(plan.against) + plan.repeats)
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        begin("preparing the checkpoint")
        _prepare(plan, folder)
        begin("starting complete and minigpt serve")
        contestants: dict[str, Any] = {
            "complete": stack.enter_context(_complete(plan, folder)),
            "minigpt serve": _Load(plan, stack.enter_context(_minigpt(plan, folder)), folder.name),
        }
        for name in plan.against:
            begin(f"starting {name} serve")
            url = stack.enter_context(_transformers(plan, folder))
            contestants[f"{name} serve"] = _Load(plan, url, str(folder))
        found: dict[str, list[Round]] = {name: [] for name in contestants}
        for contestant in contestants.values():
            contestant()  # untimed: compilers, caches
        for number in range(plan.repeats):
            begin(f"round {number + 1} of {plan.repeats}")
            for name, contestant in contestants.items():
                found[name].append(contestant())
    speeds = {name: statistics.median(one.tokens / one.seconds for one in rounds) for name, rounds in found.items()}
    ours = speeds["minigpt serve"]
    return {
        "plan": dataclasses.asdict(plan),
        "environment": environment(torch.get_num_threads(), "fastapi", "uvicorn"),
        "contestants": {name: _described(speeds[name], rounds) for name, rounds in found.items()},
        "share_of_complete": ours / speeds["complete"],
        "times_as_fast_as": {name: ours / speeds[f"{name} serve"] for name in plan.against},
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
    """Put a checkpoint and its tokenizer into a folder, where all contestants load them."""
    if plan.model is None:
        torch.manual_seed(0)
        config = dataclasses.replace(GPT2Config.preset(plan.preset), eos_token_id=None)
        save_pretrained(GPT2(config), folder, _any_tokenizer(config.vocab_size))
    else:
        model = from_pretrained(plan.model, device="cpu", dtype="float32")
        save_pretrained(model, folder, Tokenizer.from_pretrained(plan.model))


def _any_tokenizer(vocab_size: int) -> Tokenizer:
    """Return a byte-level tokenizer of so many tokens, in which every byte of a text is a token."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"token{i}" for i in range(vocab_size - 257))]
    backend = tokenizers.Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return Tokenizer(backend)


class _Load:
    """The clients of a server."""

    def __init__(self, plan: ServePlan, url: str, model: str) -> None:
        self.plan, self.model = plan, model
        self.port = int(url.rpartition(":")[2])

    def __call__(self) -> Round:
        return asyncio.run(self._round())

    async def _round(self) -> Round:
        prompts = self.plan.prompts
        shares = [prompts[i :: self.plan.clients] for i in range(self.plan.clients)]
        began = time.perf_counter()
        found = await asyncio.gather(*map(self._client, shares))
        seconds = time.perf_counter() - began
        waits = [wait for few in found for wait, _ in few]
        return Round(seconds, sum(count for few in found for _, count in few), waits)

    async def _client(self, prompts: list[str]) -> list[tuple[float, int]]:
        return [await self._ask(prompt) for prompt in prompts]

    async def _ask(self, prompt: str) -> tuple[float, int]:
        """Stream one text; return the wait for its first token, and the number of its tokens."""
        body = json.dumps({
            "model": self.model, "prompt": prompt, "max_tokens": self.plan.new_tokens, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True},
        }).encode()  # fmt: skip
        began, first, said = time.perf_counter(), None, b""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        lines = ("POST /v1/completions HTTP/1.1", f"Host: 127.0.0.1:{self.port}", "Content-Type: application/json",
                 f"Content-Length: {len(body)}", "Connection: close", "", "")  # fmt: skip
        writer.write("\r\n".join(lines).encode() + body)
        while part := await reader.read(2**16):
            said = (said + part)[-4000:]
            if first is None and b"data: " in said:
                first = time.perf_counter() - began
        writer.close()
        usage = said.rfind(b'"usage"')
        count = said.find(b'"completion_tokens"', usage)
        if first is None or count < 0:
            raise MiniGPTError(f"a server answered without tokens: {said[-300:]!r}")
        return first, int(said[count:].split(b":")[1].split(b",")[0].strip(b" }"))


@contextlib.contextmanager
def _complete(plan: ServePlan, folder: Path) -> Iterator[Any]:
    spec = json.dumps({"folder": str(folder), "dtype": plan.dtype, "prompts": plan.prompts, "new": plan.new_tokens})
    command = [sys.executable, "-m", "minigpt.bench.complete_worker", spec, str(plan.clients)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
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


@contextlib.contextmanager
def _minigpt(plan: ServePlan, folder: Path) -> Iterator[str]:
    port = _free_port()
    command = [sys.executable, "-m", "minigpt", "serve", "--model", str(folder), "--port", str(port)]
    more = ["--max-batch", str(plan.clients), "--dtype", plan.dtype]
    with _server([*command, *more], port) as url:
        yield url


@contextlib.contextmanager
def _transformers(plan: ServePlan, folder: Path) -> Iterator[str]:
    port = _free_port()
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder), "--continuous-batching"]
    more = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", plan.dtype]
    with _server([*command, *more], port) as url:
        yield url


@contextlib.contextmanager
def _server(command: list[str], port: int) -> Iterator[str]:
    """Start a server, wait until it is ready, and end it afterwards."""
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + PATIENCE
        while not _is_ready(url):
            if process.poll() is not None:
                raise MiniGPTError(f"{' '.join(command[1:5])} ended with status {process.returncode}")
            if time.monotonic() > deadline:
                raise MiniGPTError(f"{' '.join(command[1:5])} was not ready within {PATIENCE} s")
            time.sleep(0.2)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]
