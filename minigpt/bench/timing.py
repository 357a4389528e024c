"""Turns and clocks of the benchmarks, and the machine that they ran on."""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from minigpt.device import HAS_BFLOAT16, finish, processor_name, software

Who = TypeVar("Who")
Result = TypeVar("Result")


def in_turns(contestants: Mapping[Who, Callable[[], Result]], rounds: Iterable[object]) -> dict[Who, list[Result]]:
    """Call each once in every round, and return the results. A busy machine then slows all of them alike."""
    results: dict[Who, list[Result]] = {who: [] for who in contestants}
    for _ in rounds:
        for who, run in contestants.items():
            results[who].append(run())
    return results


def seconds_per_call(call: Callable[[], object], loops: int, device: torch.device) -> float:
    """Return seconds per call, for ``loops`` calls in a row."""
    finish(device)
    start = time.perf_counter()
    for _ in range(loops):
        call()
    finish(device)
    return (time.perf_counter() - start) / loops


def spread(values: list[float]) -> dict[str, float]:
    """Return the median, and the 20th and 80th percentile."""
    shares = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64))
    return dict(zip(("median", "p20", "p80"), shares.tolist(), strict=True))


def environment(*packages: str) -> dict[str, Any]:
    """Return the processor, its instructions, the threads and the load, and the versions of Python and packages."""
    return {
        "processor": processor_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "bfloat16_instructions": HAS_BFLOAT16,
        "vnni": torch.cpu._is_vnni_supported(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
        **software("transformers", *packages),
    }
