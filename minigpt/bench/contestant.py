"""A program that is timed, in a separate process: two thread pools in one process would disturb each other.

A program is a class. ``__init__(folder, prompts, kind, **options)`` loads the checkpoint, ``prefill()`` reads its
``prompts``, and ``generate(new)`` adds ``new`` tokens to each and returns how many it wrote. Every call has fresh
prompts: some programs keep what they computed of a prompt, and the same prompt twice would measure that. This file
imports little: the memory of a process is measured from here on.
"""

import os
import pkgutil
import random
import resource
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from minigpt.errors import MiniGPTError

Who = TypeVar("Who")
Result = TypeVar("Result")
FACTS = ("acceptance", "decoding", "step_bytes")  # what a program may say about itself
_program: Any = None  # of this process
_bare_mb = 0.0  # the memory of this process before the program was loaded
_chance = random.Random(0)  # the same in every process, so all programs read the same prompts


def in_turns(contestants: Mapping[Who, Callable[[], Result]], rounds: Iterable[object]) -> dict[Who, list[Result]]:
    """Call each once in every round, and return the results. A busy machine then slows all of them alike."""
    results: dict[Who, list[Result]] = {who: [] for who in contestants}
    for _ in rounds:
        for who, run in contestants.items():
            results[who].append(run())
    return results


class Contestant:
    """The process of one program. ``close`` ends it.

    Args:
        home: the program's class, "package.module:Name".
        new: tokens to add to each prompt.
        arguments: of the class.

    Raises:
        MiniGPTError: if the program cannot be loaded.
    """

    def __init__(self, home: str, new: int, **arguments: Any) -> None:
        self.name = home.partition(":")[2]
        self.rows = len(arguments["prompts"])
        self.new = new
        self._pool = ProcessPoolExecutor(1, get_context("spawn"))
        self._call(_load, home, arguments)

    def run(self) -> dict[str, Any]:
        """Return the milliseconds of a round, the memory so far, and what the program says about itself.

        Raises:
            MiniGPTError: if it fails, or writes more or fewer tokens than it must.
        """
        return self._call(_timed_round, self.rows, self.new)

    def close(self) -> None:
        """End the process."""
        self._pool.shutdown()

    def _call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        try:
            with _without_interrupts():  # the first call starts the process
                future = self._pool.submit(function, *arguments)
            return future.result()
        except Exception as error:  # of the program, or its process has died
            self.close()
            reason = str(error)
            if not isinstance(error, MiniGPTError):
                reason = f"{type(error).__name__}: {reason}"
            raise MiniGPTError(f"{self.name} could not be timed: {reason}") from error


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Block SIGINT in the block, and for ever in a process that it starts: the parent ends that one."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _load(home: str, arguments: dict[str, Any]) -> None:
    """Load the program of this process, and let it write once. What it prints is dropped."""
    global _program, _bare_mb
    for stream in (1, 2):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream)
    import torch  # noqa: F401 (the program's memory is measured beyond it)

    _bare_mb = peak_mb()
    program_class = pkgutil.resolve_name(home)
    _program = program_class(**arguments)
    _program.generate(2)  # warm


def _timed_round(rows: int, new: int) -> dict[str, Any]:
    """Return the milliseconds of reading, of reading and one token, and of all tokens; the memory; the facts."""
    measured: dict[str, Any] = {}
    _put_fresh_prompts()
    measured["prefill_ms"] = _milliseconds(_program.prefill)
    _put_fresh_prompts()
    measured["first_token_ms"] = _milliseconds(lambda: _program.generate(1))
    _put_fresh_prompts()
    start = time.perf_counter()
    start_cpu = time.process_time()
    written = _program.generate(new)
    measured["total_ms"] = 1000 * (time.perf_counter() - start)
    measured["total_cpu_ms"] = 1000 * (time.process_time() - start_cpu)
    due = rows * new
    if written != due:
        raise MiniGPTError(f"it wrote {written} tokens, and {due} were due")
    measured["memory_mb"] = peak_mb() - _bare_mb
    for name in FACTS:
        measured[name] = getattr(_program, name, None)
    return measured


def _put_fresh_prompts() -> None:
    """Give the program of this process prompts of the same tokens in another order."""
    _program.prompts = [_chance.sample(prompt, len(prompt)) for prompt in _program.prompts]


def _milliseconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - start)


def peak_mb() -> float:
    """Return the most memory that this process has used, with the mapped files that it read."""
    status = Path("/proc/self/status")
    if status.exists():  # where getrusage would count the parent's memory in
        after = status.read_text().partition("VmHWM:")[2]
        kibibytes = int(after.split()[0])
        return kibibytes / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
