"""A contestant in a separate process, which measures its memory too."""

import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from minigpt.errors import MiniGPTError


@contextmanager
def contestant(
    name: str, new: int, environment: dict[str, str] | None = None, **how: Any
) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Load a contestant in another process, and return a function that asks it to "run" or to "describe" itself.

    Args:
        name: one of ``CONTESTANTS``.
        new: tokens to add to each prompt.
        environment: variables of the process.
        how: arguments of the contestant.

    Raises:
        MiniGPTError: if it fails, or writes more or fewer tokens than it is asked for.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, name, new, environment or {}, how), daemon=True)
    process.start()
    theirs.close()

    def ask(what: str) -> dict[str, Any]:
        try:
            ours.send(what)
            answer = ours.recv()
        except (EOFError, OSError):
            process.join()
            answer = f"its process ended with status {process.exitcode}"
        if isinstance(answer, str):
            raise MiniGPTError(f"{name} could not be timed: {answer}")
        return answer

    try:
        ask("describe")  # answered when it is loaded
        yield ask
    finally:
        process.kill()
        process.join()


def _work(pipe: Connection, name: str, new: int, environment: dict[str, str], how: dict[str, Any]) -> None:
    os.environ |= environment
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)  # libraries print
    try:
        _answer(pipe, name, new, how)
    except Exception as error:
        pipe.send(str(error) if isinstance(error, MiniGPTError) else f"{type(error).__name__}: {error}")


def _answer(pipe: Connection, name: str, new: int, how: dict[str, Any]) -> None:
    import torch  # noqa: F401 (what follows is measured beyond it)

    bare_mb = peak_mb()
    from torch._dynamo.utils import counters

    from minigpt.bench.contestants import CONTESTANTS

    one = CONTESTANTS[name](**how)
    asked = len(how["prompts"]) * new
    one.generate(2)  # warm
    while True:
        if pipe.recv() == "describe":
            known = {name: getattr(one, name, None) for name in ("acceptance", "decoding")}
            compilations = int(counters["stats"]["unique_graphs"])
            pipe.send({"memory_mb": peak_mb() - bare_mb, "compilations": compilations} | known)
            continue
        measured = {"prefill_ms": _milliseconds(one.prefill)}
        measured["first_token_ms"] = _milliseconds(lambda: one.generate(1))
        start, start_cpu = time.perf_counter(), time.process_time()
        made = one.generate(new)
        measured["total_ms"] = 1000 * (time.perf_counter() - start)
        measured["total_cpu_ms"] = 1000 * (time.process_time() - start_cpu)
        if made != asked:
            raise MiniGPTError(f"it wrote {made} tokens where {asked} were asked for")
        pipe.send(measured)


def peak_mb() -> float:
    """Return the most memory that this process has used, with the mapped files that it read."""
    if (status := Path("/proc/self/status")).exists():  # where getrusage would count the parent's memory in
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _milliseconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - start)
