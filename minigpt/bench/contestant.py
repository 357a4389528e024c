"""A program that is timed, in a separate process: two thread pools in one process would disturb each other.

A program is a class. ``__init__(folder, prompts, kind, **options)`` loads the checkpoint, ``prefill()`` reads the
prompts, and ``generate(new)`` adds ``new`` tokens to each and returns how many it wrote. This file imports little: the
memory of a process is measured from here on.
"""

import contextlib
import json
import os
import pkgutil
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from minigpt.errors import MiniGPTError

Who = TypeVar("Who")
Result = TypeVar("Result")
FACTS = ("acceptance", "decoding", "step_bytes")  # what a program may tell about itself


def in_turns(contestants: Mapping[Who, Callable[[], Result]], rounds: Iterable[object]) -> dict[Who, list[Result]]:
    """Call each once in every round, and return the results. A busy machine then slows all of them alike."""
    results: dict[Who, list[Result]] = {who: [] for who in contestants}
    for _ in rounds:
        for who, run in contestants.items():
            results[who].append(run())
    return results


class Contestant:
    """The process of one program. For each line that it reads, it prints a line of JSON. ``close`` ends it.

    Args:
        home: the program's class, "package.module:Name".
        new: tokens to add to each prompt.
        arguments: of the class, as JSON types.

    Raises:
        MiniGPTError: if the program cannot be loaded.
    """

    def __init__(self, home: str, new: int, **arguments: Any) -> None:
        self.name = home.partition(":")[2]
        words = [sys.executable, "-m", "minigpt.bench.contestant", home, str(new)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._ask(json.dumps(arguments))

    def run(self) -> dict[str, Any]:
        """Return the milliseconds of a round, the memory so far, and what the program tells about itself.

        Raises:
            MiniGPTError: if it fails, or writes more or fewer tokens than it must.
        """
        return self._ask("run")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(line, file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline() or "{}")
        if error := answer.get("error", None if answer else f"its process ended with status {self._process.wait()}"):
            self.close()
            raise MiniGPTError(f"{self.name} could not be timed: {error}")
        return answer


def main(home: str, new: int) -> None:
    """Answer the lines on standard input. What the program prints is dropped."""
    answers = os.fdopen(os.dup(1), "w")
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    try:
        import torch  # noqa: F401 (the program's memory is measured beyond it)

        bare_mb = peak_mb()
        arguments = json.loads(sys.stdin.readline())
        program = pkgutil.resolve_name(home)(**arguments)
        program.generate(2)  # warm
        print(json.dumps({"loaded": True}), file=answers, flush=True)
        for _ in sys.stdin:
            answer = timed_round(program, len(arguments["prompts"]), new) | {"memory_mb": peak_mb() - bare_mb}
            facts = {name: getattr(program, name, None) for name in FACTS}
            print(json.dumps(answer | facts), file=answers, flush=True)
    except Exception as error:
        message = str(error) if isinstance(error, MiniGPTError) else f"{type(error).__name__}: {error}"
        print(json.dumps({"error": message}), file=answers, flush=True)


def timed_round(program: Any, rows: int, new: int) -> dict[str, float]:
    """Return the milliseconds of reading, of reading and one token, and of all tokens."""
    times = {"prefill_ms": _milliseconds(program.prefill), "first_token_ms": _milliseconds(lambda: program.generate(1))}
    start, start_cpu = time.perf_counter(), time.process_time()
    written = program.generate(new)
    times["total_ms"] = 1000 * (time.perf_counter() - start)
    times["total_cpu_ms"] = 1000 * (time.process_time() - start_cpu)
    if written != rows * new:
        raise MiniGPTError(f"it wrote {written} tokens, and {rows * new} were due")
    return times


def _milliseconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - start)


def peak_mb() -> float:
    """Return the most memory that this process has used, with the mapped files that it read."""
    if (status := Path("/proc/self/status")).exists():  # where getrusage would count the parent's memory in
        return int(status.read_text().partition("VmHWM:")[2].split()[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
