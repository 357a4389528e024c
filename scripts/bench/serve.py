"""Time ``minigpt serve`` under load, in turns with other servers, on the same greedy prompts.

    python scripts/bench/serve.py --model demo --against transformers,llama-server
    python scripts/bench/serve.py --against 'llamafile=llamafile --server -m my.gguf --port {port}'

Each client sends its next request when it has the last answer. A server is started as a user starts it, and has two
turns in a round: one with answers that stream, one with answers that come whole. The program llama-server must be on
the PATH, or LLAMA_SERVER must be its path. Another server is NAME=COMMAND, where {folder} and {port} are filled in.
"""

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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # scripts/

import torch
import typer
from bench.others import GGML_TYPES, write_gguf
from bench.results import JsonFile, show

from minigpt.bench.contestant import in_turns
from minigpt.bench.generate import environment
from minigpt.checkpoint.save import save_pretrained
from minigpt.recipe import Recipe
from minigpt.tokenizer import Tokenizer

SECONDS_TO_START = 180
FIELDS = {"llama-server": {"ignore_eos": True, "cache_prompt": False}}  # of a request, beside those of everybody


class Round(NamedTuple):
    """The time of a server for all texts, their tokens, and the seconds to the first token of each that it streamed."""

    seconds: float
    tokens: int
    first_token_seconds: list[float]


def main(
    model: str = "demo", dtype: str = "float32", quantize: str = "", clients: int = 16, requests: int = 2,
    prompt_characters: int = 32, new_tokens: int = 48, repeats: int = 3, against: str = "transformers",
    json_file: JsonFile = None,
) -> None:  # fmt: skip
    """Print, and with --json write, tokens per second and the wait for the first token of each server."""
    chance, letters = random.Random(0), string.ascii_lowercase + " "
    prompts = ["".join(chance.choices(letters, k=prompt_characters)) for _ in range(clients * requests)]
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        folder = Path(place)
        network, tokenizer = Recipe(model, device="cpu", dtype="float32").open()
        network.config = dataclasses.replace(network.config, eos_token_id=None)  # no token ends a text
        save_pretrained(network, folder, tokenizer)
        del network
        kind = f"--quantize {quantize}" if quantize else f"--dtype {dtype}"
        commands = {"minigpt": f"python -m minigpt serve --model {{folder}} --port {{port}} {kind}"}
        for name in filter(None, against.split(",")):
            commands[name.partition("=")[0]] = other_server(name, folder, quantize or dtype, clients, new_tokens)
        turns: dict[str, Callable[[], Round]] = {}
        for name, command in commands.items():
            port = stack.enter_context(running(command, folder))
            body = {"model": served_name(port), "max_tokens": new_tokens, "temperature": 0, **FIELDS.get(name, {})}
            streams = {"stream": True, "stream_options": {"include_usage": True}}
            turns[f"{name}, streamed"] = partial(loaded, clients, prompts, port, body | streams)
            turns[f"{name}, whole"] = partial(loaded, clients, prompts, port, body)
        for turn in turns.values():
            turn()  # not timed: compilers, caches
        rounds = in_turns(turns, range(repeats))
    plan = {"model": model, "kind": quantize or dtype, "clients": clients, "requests": requests, "repeats": repeats,
            "prompt_characters": prompt_characters, "new_tokens": new_tokens, "commands": commands}  # fmt: skip
    figures = {name: figures_of(turns) for name, turns in rounds.items()}
    show({"plan": plan, "environment": environment("fastapi", "uvicorn"), "servers": figures}, json_file)


def other_server(name: str, folder: Path, kind: str, clients: int, new_tokens: int) -> str:
    """Return the command that starts a server; in the kind of ours, which transformers has only as a dtype."""
    if "=" in name:
        return name.partition("=")[2]
    if name == "transformers":
        dtype = "float32" if kind == "int8" else kind
        words = f"--continuous-batching --host 127.0.0.1 --device cpu --dtype {dtype}"
        return f"python -m transformers.cli.transformers serve {{folder}} --port {{port}} {words}"
    program = os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")
    if name != "llama-server" or program is None:
        raise typer.BadParameter(f"{name} must be transformers, llama-server (on the PATH) or NAME=COMMAND")
    file, room = write_gguf(folder, GGML_TYPES[kind], Tokenizer.from_pretrained(folder)), 4 * new_tokens
    sizes = f"-np {clients} -c {clients * room} -t {torch.get_num_threads()} --cache-ram 0 --cont-batching"
    return f"{program} -m {file} --port {{port}} {sizes}"


@contextlib.contextmanager
def running(command: str, folder: Path) -> Iterator[int]:
    """Start a server, wait until it is ready, yield its port, and end it afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = re.sub(r"\bpython\b", sys.executable, command.format(folder=folder, port=port))
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(words, shell=True, start_new_session=True, **quiet)
    deadline = time.monotonic() + SECONDS_TO_START
    try:
        while not is_ready(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{words} was not ready within {SECONDS_TO_START} s, or has ended")
            time.sleep(0.2)
        yield port
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def is_ready(port: int) -> bool:
    """Return True if a server answers that it is healthy."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def served_name(port: int) -> str:
    """Return the id of the first model that a server has."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=SECONDS_TO_START) as answer:
        return json.load(answer)["data"][0]["id"]


def loaded(clients: int, prompts: list[str], port: int, body: dict[str, Any]) -> Round:
    """Let the clients send all prompts. They are light, since they share the processor with the server."""
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(partial(completion, port, body), prompts))
    seconds = time.perf_counter() - start
    return Round(seconds, sum(tokens for _, tokens in answers), [wait for wait, _ in answers if wait is not None])


def completion(port: int, body: dict[str, Any], prompt: str) -> tuple[float | None, int]:
    """Request one text; return the seconds to its first token, if it streams, and the number of its tokens."""
    url, headers = f"http://127.0.0.1:{port}/v1/completions", {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body | {"prompt": prompt}).encode(), headers)
    start, first, answer = time.perf_counter(), None, b""
    with urllib.request.urlopen(request, timeout=SECONDS_TO_START) as lines:
        for line in lines:
            answer += line
            if first is None and line.startswith(b"data: "):
                first = time.perf_counter() - start
    return first, int(re.findall(rb'"completion_tokens": ?(\d+)', answer)[-1])


def figures_of(rounds: list[Round]) -> dict[str, Any]:
    """Return the figures of a server's turns: medians, and percentiles of the wait for the first token."""
    waits = sorted(wait for one in rounds for wait in one.first_token_seconds)
    shares = {f"p{share}": 1000 * waits[len(waits) * share // 100] for share in (50, 99) if waits}
    speed = statistics.median(one.tokens / one.seconds for one in rounds)
    return {
        "tokens_per_second": speed, "seconds": [one.seconds for one in rounds],
        "tokens": [one.tokens for one in rounds], "first_token_ms": shares or None,
    }  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
