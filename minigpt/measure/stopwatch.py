"""Time calls."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch

Who = TypeVar("Who")
Told = TypeVar("Told")


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median, 20th and 80th percentile of several times."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(*np.percentile(values, (50, 20, 80)).tolist())


def in_turns(contestants: Mapping[Who, Callable[[], Told]], rounds: Iterable[object]) -> dict[Who, list[Told]]:
    """Call each once in every round, and return the results. A busy machine then slows all of them alike."""
    found: dict[Who, list[Told]] = {who: [] for who in contestants}
    for _ in rounds:
        for who, run in contestants.items():
            found[who].append(run())
    return found


def finish(device: torch.device) -> None:
    """Wait until a device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_seconds(call: Callable[[], object], loops: int, device: torch.device) -> float:
    """Return seconds per call, for ``loops`` calls in a row."""
    finish(device)
    start = time.perf_counter()
    for _ in range(loops):
        call()
    finish(device)
    return (time.perf_counter() - start) / loops
