"""Time norms in turns, forward and backward.

A norm cannot be faster than memory. So every time is also given as a share of the rate of a plain copy of the input.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from minigpt import norms
from minigpt.bench.contestant import in_turns
from minigpt.device import finish, require_values, resolve_device
from minigpt.errors import ConfigError
from minigpt.machine import versions
from minigpt.precision import dtype_name, resolve_dtype
from minigpt.progress import Progress, Steps

GPT2_WIDTHS = (768, 1024, 1280, 1600)
USUAL_ROWS = {"cuda": (1, 64, 1024, 16_384, 65_536), "cpu": (1, 64, 1024)}
USUAL_DTYPES = {"cuda": torch.bfloat16}
STREAMS = {"forward": 2, "backward": 3}  # tensors of the input's size that are read or written
CELL = "{ms:.4g} ms  {gb_per_s:.4g} GB/s  {share_of_copy:.2f}"
Calls = dict[str, Callable[[], object]]
SHORTEST_SECONDS = 2e-3  # between two readings of a clock


def bench_norms(
    names: Iterable[str] = (),
    *,
    widths: Iterable[int] = (),
    rows: Iterable[int] = (),
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    repeats: int = 20,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Return a timing for each width, number of rows, pass and norm, and where they were taken, as JSON types.

    A timing has the median milliseconds of a call, 10^9 bytes a second, and that rate as a share of a plain copy's.

    Args:
        names: norms, as ``norms.build`` takes them; "fused" by default, and "triton" if it runs on the device.
        widths: numbers in a row; by default GPT-2's.
        rows: numbers of rows.
        device: CUDA by default if there is one, else the CPU.
        dtype: bfloat16 on CUDA by default, and float32 on a CPU.
        repeats: rounds; each norm is timed once in a round.
        progress: called with the name of each step, and the share of steps done.

    Raises:
        NormError: if a norm is unknown.
        ConfigError: if the device is absent, or a width, or a number of rows or repeats is out of range.
    """
    device = resolve_device(device)
    require_values(device)
    dtype = resolve_dtype(dtype) or USUAL_DTYPES.get(device.type, torch.float32)
    widths = list(widths) or list(GPT2_WIDTHS)
    rows = list(rows) or list(USUAL_ROWS.get(device.type, USUAL_ROWS["cpu"]))
    _check_sizes(widths, rows, repeats)
    names = list(names) or _usual_names(device)
    timings = []
    begin = Steps(progress, total=len(widths) * len(rows) * len(STREAMS))
    for width in widths:
        modules = {name: norms.build(name, width).to(device, dtype) for name in names}
        for count, computes in itertools.product(rows, STREAMS):
            begin(f"{computes}, {count:,} rows of {width}")
            pair = torch.randn(2, count, width, device=device)
            x, gradient = pair.to(dtype)
            calls = {name: _call(computes, module, x, gradient) for name, module in modules.items()}
            timings += _timings(computes, calls, x, repeats)
    return {"device": str(device), "dtype": dtype_name(dtype), "versions": versions(device), "timings": timings}


def _usual_names(device: torch.device) -> list[str]:
    """Return "fused", and "triton" if it runs on the device."""
    triton = norms.available()["triton"]
    if triton.reason_on(device) is None:
        return ["fused", "triton"]
    return ["fused"]


def _check_sizes(widths: list[int], rows: list[int], repeats: int) -> None:
    """Raise a ConfigError unless every number can be used."""
    is_positive = min(*widths, *rows, repeats) >= 1
    fits = max(*widths, *rows) < 2**31
    if not (is_positive and fits):
        raise ConfigError("widths, rows and repeats must be 1 or more, and widths and rows below 2^31")


def _timings(computes: str, calls: Calls, x: Tensor, repeats: int) -> list[dict[str, Any]]:
    """Return a timing of each norm's pass over the rows ``x`` (N, C), and of a plain copy of them."""
    copy = partial(torch.empty_like(x).copy_, x)
    seconds = _median_seconds(calls | {"copy": copy}, repeats, x.device)
    copied = 2 * x.nbytes / seconds.pop("copy")
    count, width = x.shape
    timings = []
    for name, taken in seconds.items():
        rate = STREAMS[computes] * x.nbytes / taken  # bytes a second
        timing = {"norm": name, "computes": computes, "width": width, "rows": count}
        timing["ms"] = 1e3 * taken
        timing["gb_per_s"] = rate / 1e9
        timing["share_of_copy"] = rate / copied
        timings.append(timing)
    return timings


def norms_table(bench: dict[str, Any]) -> RenderableType:
    """Return a line for each shape and pass, and a column for each norm: time, rate, share of a copy's rate."""
    names = dict.fromkeys(timing["norm"] for timing in bench["timings"])
    table = Table("width", "rows", "computes", *names, box=None, pad_edge=False)
    by_shape = itertools.groupby(bench["timings"], itemgetter("width", "rows", "computes"))
    for (width, rows, computes), timings in by_shape:
        cells = [CELL.format(**timing) for timing in timings]
        table.add_row(str(width), f"{rows:,}", computes, *cells)
    found = bench["versions"]
    machine = f"{bench['device']}, {found['hardware']}, torch {found['torch']}"
    head = f"{bench['dtype']} on {machine}; after the rate, its share of the rate of a plain copy"
    return Group(Text(head), table)


def _median_seconds(calls: Calls, repeats: int, device: torch.device) -> dict[str, float]:
    """Return the median seconds of each call, timed in turns."""
    clocks = {}
    for name, call in calls.items():
        call()  # compilers, caches
        once = _seconds(call, 1, device)
        loops = SHORTEST_SECONDS / max(once, 1e-7)
        loops = 1 + int(min(100, loops))
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
    total = time.perf_counter() - start
    return total / loops


def _call(computes: str, module: nn.Module, x: Tensor, gradient: Tensor) -> Callable[[], object]:
    """Return a function that runs one pass over the rows ``x`` (N, C)."""
    if computes == "forward":
        return torch.no_grad()(lambda: module(x))
    leaf = x.detach().requires_grad_()
    leaves = [leaf, *module.parameters()]
    y = module(leaf)
    return lambda: torch.autograd.grad(y, leaves, gradient, retain_graph=True)
