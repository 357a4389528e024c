"""How long something takes: by the wall's clock, by a GPU's own, and beside something else."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch

HEAD_START = 2_000_000  # cycles of a GPU, about a millisecond

Who = TypeVar("Who")
Told = TypeVar("Told")


@dataclasses.dataclass(frozen=True)
class Spread:
    """The median of several times, and their 20th and 80th percentiles."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        ordered = sorted(values)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)])


def in_turns(contestants: Mapping[Who, Callable[[], Told]], rounds: Iterable[object]) -> dict[Who, list[Told]]:
    """What each returns, once a round: taken in turns, a machine that is busy is busy for all."""
    found: dict[Who, list[Told]] = {who: [] for who in contestants}
    for _ in rounds:
        for who, run in contestants.items():
            found[who].append(run())
    return found


def finish(device: torch.device) -> None:
    """Wait until a device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_seconds(call: Callable[[], object], loops: int, device: torch.device) -> float:
    """Seconds a call, of ``loops`` in a row, until the last result is there."""
    finish(device)
    start = time.perf_counter()
    for _ in range(loops):
        call()
    finish(device)
    return (time.perf_counter() - start) / loops


def gpu_seconds(call: Callable[[], object], loops: int, device: torch.device) -> float:
    """What one call takes the GPU alone.

    It is put to sleep until all the calls are in its queue, longer if need be, so that it waits for no launch. Calls
    that wait for the GPU themselves never get ahead of it, and what they wait is counted.
    """
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for doublings in range(8):
            torch.cuda._sleep(HEAD_START << doublings)
            begin.record()
            for _ in range(loops):
                call()
            was_asleep = not begin.query()
            end.record()
            end.synchronize()
            if was_asleep:
                break
        return begin.elapsed_time(end) / 1e3 / loops
