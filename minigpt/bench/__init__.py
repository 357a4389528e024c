"""How fast is it on this machine, beside transformers and the limit that memory sets?

A contestant runs in a separate process, which measures its memory too. It is a class: ``__init__(folder, prompts,
kind, **options)`` loads the checkpoint, ``prefill()`` reads the prompts, and ``generate(new)`` adds so many tokens to
each and returns how many it wrote. This file imports little: what a process holds is measured from here on.
"""

import multiprocessing
import os
import pkgutil
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from minigpt.errors import MiniGPTError

Ask = Callable[[str], dict[str, Any]]


@contextmanager
def contestant(home: str, new: int, environment: dict[str, str] | None = None, **how: Any) -> Iterator[Ask]:
    """Load a contestant in another process, and return a function that asks it to "run" or to "describe" itself.

    Args:
        home: its class, "package.module:Name".
        new: tokens to add to each prompt.
        environment: variables of the process.
        how: arguments of the class.

    Raises:
        MiniGPTError: if it fails, or writes more or fewer tokens than it is asked for.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there, home, new, environment or {}, how), daemon=True)
    process.start()
    there.close()

    def ask(what: str) -> dict[str, Any]:
        try:
            here.send(what)
            answer = here.recv()
        except (EOFError, OSError):
            process.join()
            answer = f"its process ended with status {process.exitcode}"
        if isinstance(answer, str):
            raise MiniGPTError(f"{home.partition(':')[2]} could not be timed: {answer}")
        return answer

    try:
        ask("describe")  # answered when it is loaded
        yield ask
    finally:
        process.kill()
        process.join()


def _work(pipe: Connection, home: str, new: int, environment: dict[str, str], how: dict[str, Any]) -> None:
    os.environ |= environment
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)  # libraries print
    try:
        _answer(pipe, home, new, how)
    except Exception as error:
        pipe.send(str(error) if isinstance(error, MiniGPTError) else f"{type(error).__name__}: {error}")


def _answer(pipe: Connection, home: str, new: int, how: dict[str, Any]) -> None:
    import torch  # noqa: F401 (what follows is measured beyond it)

    bare_mb, loaded = peak_mb(), pkgutil.resolve_name(home)(**how)
    loaded.generate(2)  # warm
    while True:
        if pipe.recv() == "describe":
            facts = {name: getattr(loaded, name, None) for name in ("acceptance", "decoding", "step_bytes")}
            pipe.send({"memory_mb": peak_mb() - bare_mb} | facts)
            continue
        times = {
            "prefill_ms": _milliseconds(loaded.prefill),
            "first_token_ms": _milliseconds(lambda: loaded.generate(1)),
        }
        start, start_cpu = time.perf_counter(), time.process_time()
        written = loaded.generate(new)
        times["total_ms"] = 1000 * (time.perf_counter() - start)
        times["total_cpu_ms"] = 1000 * (time.process_time() - start_cpu)
        if written != len(how["prompts"]) * new:
            raise MiniGPTError(f"it wrote {written} tokens where {len(how['prompts']) * new} were asked for")
        pipe.send(times)


def peak_mb() -> float:
    """Return the most memory that this process has used, with the mapped files that it read."""
    if (status := Path("/proc/self/status")).exists():  # where getrusage would count the parent's memory in
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _milliseconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - start)
