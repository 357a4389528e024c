"""Time norms in turns, forward and backward, a width at a time.

A norm cannot be faster than memory. So every time is also given as a share of the rate of a plain copy of the input.
"""

import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from gpu.models import finish, known_norms
from torch import Tensor, nn

from minigpt.bench.contestant import in_turns
from minigpt.norms import build
from minigpt.precision import dtype_name

GPT2_WIDTHS = (768, 1024, 1280, 1600)
ROWS = (1, 64, 1024, 16_384, 65_536)
STREAMS = {"forward": 2, "backward": 3}  # tensors of the input's size that are read or written
SHORTEST_SECONDS = 2e-3  # between two readings of a clock
LIGER = "liger_kernel.transformers:LigerLayerNorm"


def norms(results: dict[str, Any], device: torch.device, quick: bool) -> Iterator[str]:
    """Into ``results``: timings of every width, pass and number of rows."""
    rows, repeats = ((1, 5), 2) if quick else (ROWS, 10)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    has_liger = device.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None
    names = [*known_norms(("fused", "triton"), device), *[LIGER] * has_liger]
    results["dtype"] = dtype_name(dtype)
    results["rows"] = []
    for width in (48,) if quick else GPT2_WIDTHS:
        yield f"width {width}"
        results["rows"] += timed(names, width, rows, device, dtype, repeats)


def timed(
    names: Sequence[str], width: int, rows: Sequence[int], device: torch.device, dtype: torch.dtype, repeats: int
) -> list[dict[str, Any]]:
    """Return a timing for each number of rows, pass and norm.

    A timing has the median milliseconds of a call, 10^9 bytes a second, and that rate as a share of a plain copy's.
    """
    modules = {name: build(name, width).to(device, dtype) for name in names}
    timings = []
    for count, computes in itertools.product(rows, STREAMS):
        pair = torch.randn(2, count, width, device=device)
        x, gradient = pair.to(dtype)
        calls = {name: _call(computes, module, x, gradient) for name, module in modules.items()}
        seconds = _median_seconds(calls | {"copy": partial(torch.empty_like(x).copy_, x)}, repeats, device)
        copied = 2 * x.nbytes / seconds.pop("copy")
        for name, taken in seconds.items():
            rate = STREAMS[computes] * x.nbytes / taken  # bytes a second
            timing = {"norm": name, "computes": computes, "width": width, "rows": count, "ms": 1e3 * taken}
            timings.append(timing | {"gb_per_s": rate / 1e9, "share_of_copy": rate / copied})
    return timings


def _median_seconds(calls: dict[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, float]:
    """Return the median seconds of each call, timed in turns."""
    clocks = {}
    for name, call in calls.items():
        call()  # compilers, caches
        once = _seconds(call, 1, device)
        loops = 1 + int(min(100, SHORTEST_SECONDS / max(once, 1e-7)))
        clocks[name] = partial(_seconds, call, loops, device)
    times = in_turns(clocks, range(repeats))
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def _seconds(call: Callable[[], object], loops: int, device: torch.device) -> float:
    """Return the seconds of one call, as the mean of several."""
    finish(device)
    start = time.perf_counter()
    for _ in range(loops):
        call()
    finish(device)
    return (time.perf_counter() - start) / loops


def _call(computes: str, module: nn.Module, x: Tensor, gradient: Tensor) -> Callable[[], object]:
    """Return a function that runs one pass over the rows ``x`` (N, C)."""
    if computes == "forward":
        return torch.no_grad()(lambda: module(x))
    leaf = x.detach().requires_grad_()
    leaves = [leaf, *module.parameters()]
    y = module(leaf)
    return lambda: torch.autograd.grad(y, leaves, gradient, retain_graph=True)
