"""The server under load, in turns with ``complete`` on the same texts, and with transformers' server."""

import contextlib
import dataclasses
import json
import os
import random
import re
import socket
import statistics
import string
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table

from minigpt.bench import contestant
from minigpt.bench.generate import bench_model
from minigpt.checkpoint import save_pretrained
from minigpt.device import Progress, Steps, environment, in_turns
from minigpt.errors import ConfigError, MiniGPTError
from minigpt.generation import complete
from minigpt.recipe import Recipe
from minigpt.tokenizer import Tokenizer

WHOLE = ", whole answers"
PATIENCE = 180  # seconds for a server to be ready
CALM = {"OMP_WAIT_POLICY": "PASSIVE"}  # for each contestant: threads that wait leave the processor to the clients


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServePlan:
    """What is timed.

    Attributes:
        model: a checkpoint with its tokenizer.
        kind: "float32", "bfloat16", "float16", "float64" or "int8". transformers has no int8 and computes in float32.
        clients: how many ask at once. Each sends its next request when it has the last answer.
        requests: of each client, in a round.
        prompt_characters: of each prompt, which is random letters.
        new_tokens: of each text. Every contestant is greedy, and goes on after an end of text.
        against: other servers: "transformers".

    Raises:
        ConfigError: if a server is unknown.
    """

    model: str = "demo"
    kind: str = "float32"
    clients: int = 16
    requests: int = 2
    prompt_characters: int = 32
    new_tokens: int = 48
    repeats: int = 3
    against: tuple[str, ...] = ("transformers",)

    def __post_init__(self) -> None:
        if unknown := set(self.against) - set(SERVERS):
            raise ConfigError(f"must be transformers, got {unknown.pop()!r}", argument="against")

    @property
    def prompts(self) -> list[str]:
        chance, letters = random.Random(0), string.ascii_lowercase + " "
        return ["".join(chance.choices(letters, k=self.prompt_characters)) for _ in range(self.clients * self.requests)]


class Server(NamedTuple):
    """A program that serves OpenAI's completions: its name, command without a port, and fields of a request."""

    name: str
    command: Callable[[ServePlan, Path], list[str]]
    fields: Callable[[Path], dict[str, Any]]


class Round(NamedTuple):
    """How long a contestant took for how many tokens, and for the first token of each text that it streamed."""

    seconds: float
    tokens: int
    first_token_seconds: list[float]


class Complete:
    """``minigpt.generation.complete`` on texts, so many at a time."""

    def __init__(self, folder: str, prompts: list[str], kind: str, places: int) -> None:
        self.model, self.tokenizer = bench_model(folder, kind), Tokenizer.from_pretrained(folder)
        self.prompts, self.places = prompts, places

    def prefill(self) -> None:
        """Do nothing: a text's prompt is read when it takes its place."""

    def generate(self, new: int) -> int:
        texts = complete(self.model, self.tokenizer, self.prompts, batch_size=self.places, max_new_tokens=new)
        return sum(len(text.ids) for text in texts)


def _minigpt(plan: ServePlan, folder: Path) -> list[str]:
    kind = ["--quantize", "int8"] if plan.kind == "int8" else ["--dtype", plan.kind]
    return [sys.executable, "-m", "minigpt", "serve", "--model", str(folder), "--max-batch", str(plan.clients), *kind]


def _transformers(plan: ServePlan, folder: Path) -> list[str]:
    dtype = "float32" if plan.kind == "int8" else plan.kind
    return [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder), "--continuous-batching",
            "--host", "127.0.0.1", "--device", "cpu", "--dtype", dtype]  # fmt: skip


SERVERS = {  # scripts/bench/others.py adds more
    "minigpt": Server("minigpt serve", _minigpt, lambda folder: {"model": folder.name}),
    "transformers": Server("transformers serve", _transformers, lambda folder: {"model": str(folder)}),
}


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
        model, tokenizer = Recipe(plan.model, device="cpu", dtype="float32").open()
        model.config = dataclasses.replace(model.config, eos_token_id=None)  # no token ends a text
        save_pretrained(model, folder, tokenizer)
        begin("starting complete")
        how = dict(folder=place, prompts=plan.prompts, kind=plan.kind, places=plan.clients)
        ask = stack.enter_context(contestant("minigpt.bench.serve:Complete", plan.new_tokens, CALM, **how))
        written = len(plan.prompts) * plan.new_tokens
        runs: dict[str, Callable[[], Round]] = {"complete": lambda: Round(ask("run")["total_ms"] / 1000, written, [])}
        for server in (SERVERS[name] for name in ("minigpt", *plan.against)):
            begin(f"starting {server.name}")
            port, fields = stack.enter_context(_running(server.command(plan, folder))), server.fields(folder)
            streams = {"stream": True, "stream_options": {"include_usage": True}}
            runs[server.name] = partial(_loaded, plan, port, fields | streams)
            runs[server.name + WHOLE] = partial(_loaded, plan, port, fields)
        for run in runs.values():
            run()  # not timed: compilers, caches
        rounds = in_turns(runs, (begin(f"round {i + 1} of {plan.repeats}") for i in range(plan.repeats)))
    speeds = {name: statistics.median(one.tokens / one.seconds for one in own) for name, own in rounds.items()}
    ours = {how: speeds[SERVERS["minigpt"].name + how] for how in ("", WHOLE)}
    return {
        "plan": dataclasses.asdict(plan),
        "environment": environment(torch.get_num_threads(), "fastapi", "uvicorn"),
        "contestants": {name: _figures(speeds[name], own) for name, own in rounds.items()},
        "share_of_complete": {
            SERVERS["minigpt"].name + how: speed / speeds["complete"] for how, speed in ours.items()
        },
        "times_as_fast_as": {
            SERVERS[other].name + how: speed / speeds[SERVERS[other].name + how]
            for other in plan.against
            for how, speed in ours.items()
        },
    }  # fmt: skip


def serve_table(report: dict[str, Any]) -> Table:
    """Return the speed of each contestant, and how long the first token of a stream took."""
    plan = report["plan"]
    title = f"{plan['clients']} clients, {plan['model']}, {plan['kind']}"
    table = Table("", "tokens/s", "first token p50", "p99", title=title)
    for name, figures in report["contestants"].items():
        waits = figures.get("first_token_ms", {})
        cells = (f"{waits[share]:.0f} ms" for share in ("p50", "p99") if waits)
        table.add_row(name, f"{figures['tokens_per_second']:.1f}", *cells)
    return table


def _figures(tokens_per_second: float, rounds: list[Round]) -> dict[str, Any]:
    waits = sorted(wait for one in rounds for wait in one.first_token_seconds)
    shares = {f"p{share}": 1000 * waits[len(waits) * share // 100] for share in (50, 90, 99) if waits}
    return {
        "tokens_per_second": tokens_per_second,
        "seconds": [one.seconds for one in rounds],
        "tokens": [one.tokens for one in rounds],
    } | ({"first_token_ms": shares} if shares else {})


def _loaded(plan: ServePlan, port: int, fields: dict[str, Any]) -> Round:
    """Let the clients ask a server. They are light, since they share the processor with it."""
    start = time.perf_counter()
    with ThreadPoolExecutor(plan.clients) as clients:
        answers = list(clients.map(partial(_asked, plan, port, fields), plan.prompts))
    seconds = time.perf_counter() - start
    return Round(seconds, sum(count for _, count in answers), [wait for wait, _ in answers if wait is not None])


def _asked(plan: ServePlan, port: int, fields: dict[str, Any], prompt: str) -> tuple[float | None, int]:
    """Ask for one text; return the seconds to its first token, if it streams, and the number of its tokens."""
    body = json.dumps(fields | {"prompt": prompt, "max_tokens": plan.new_tokens, "temperature": 0}).encode()
    url, headers = f"http://127.0.0.1:{port}/v1/completions", {"Content-Type": "application/json"}
    start, first, answer = time.perf_counter(), None, b""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=PATIENCE) as lines:
            for line in lines:
                answer += line
                if first is None and line.startswith(b"data: "):
                    first = time.perf_counter() - start
        return first, int(re.findall(rb'"completion_tokens": ?(\d+)', answer)[-1])
    except (OSError, IndexError) as error:
        raise MiniGPTError(f"a server answered without tokens: {error}, {answer[-300:]!r}") from error


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
