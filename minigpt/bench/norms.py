"""Time norms in turns, forward and backward.

A norm cannot be faster than memory. So every time is also given as a share of the rate of a plain copy of the input.
Whether a norm is right is the question of ``minigpt norms --check``.
"""

import functools
import itertools
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from minigpt import norms
from minigpt.device import (
    Progress,
    Steps,
    dtype_name,
    in_turns,
    require_values,
    resolve_device,
    resolve_dtype,
    versions,
    wall_seconds,
)
from minigpt.errors import ConfigError

WIDTHS = (768, 1024, 1280, 1600)
ROWS = {"cuda": (1, 64, 1024, 16_384, 65_536), "cpu": (1, 64, 1024)}
STREAMS = {"forward": 2, "backward": 3}  # tensors of the input's size that are read or written
ENOUGH_S = 2e-3  # a clock is read after at least so long


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
        widths: numbers in a row; by default those of GPT-2.
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
    dtype = resolve_dtype(dtype) or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    widths, rows = list(widths) or list(WIDTHS), list(rows) or list(ROWS.get(device.type, ROWS["cpu"]))
    if min(*widths, *rows, repeats) < 1 or max(*widths, *rows) >= 2**31:
        raise ConfigError("widths, rows and repeats must be 1 or more, and widths and rows below 2^31")
    triton = ["triton"] * (norms.available()["triton"].reason_on(device) is None)
    names, timings = list(names) or ["fused", *triton], []
    begin = Steps(progress, total=len(widths) * len(rows) * len(STREAMS))
    for width in widths:
        modules = {name: _with_weights(norms.build(name, width)).to(device, dtype) for name in names}
        for count, computes in itertools.product(rows, STREAMS):
            begin(f"{computes}, {count:,} rows of {width}")
            x, dy = torch.randn(2, count, width, device=device).to(dtype)
            calls = {name: _call(computes, module, x, dy) for name, module in modules.items()}
            calls["copy"] = functools.partial(torch.empty_like(x).copy_, x)
            clocks = {name: functools.partial(wall_seconds, call, _loops(call, device), device)
                      for name, call in calls.items()}  # fmt: skip
            taken = {name: statistics.median(times) for name, times in in_turns(clocks, range(repeats)).items()}
            copied = 2 * x.nbytes / taken.pop("copy")
            for name, seconds in taken.items():
                rate = STREAMS[computes] * x.nbytes / seconds  # bytes a second
                timings.append({
                    "norm": name, "computes": computes, "width": width, "rows": count, "ms": 1e3 * seconds,
                    "gb_per_s": rate / 1e9, "share_of_copy": rate / copied,
                })  # fmt: skip
    return {"device": str(device), "dtype": dtype_name(dtype), "versions": versions(device), "timings": timings}


def norms_table(bench: dict[str, Any]) -> RenderableType:
    """Return a line for each shape and pass, and a column for each norm: time, rate, share of a copy's rate."""
    names = list(dict.fromkeys(timing["norm"] for timing in bench["timings"]))
    table = Table("width", "rows", "computes", *names, box=None, pad_edge=False)
    lines: dict[tuple[str, ...], list[str]] = {}
    for timing in bench["timings"]:
        place = str(timing["width"]), f"{timing['rows']:,}", timing["computes"]
        cell = f"{timing['ms']:.4g} ms  {timing['gb_per_s']:.4g} GB/s  {timing['share_of_copy']:.2f}"
        lines.setdefault(place, []).append(cell)
    for place, cells in lines.items():
        table.add_row(*place, *cells)
    said = f"{bench['dtype']} on {bench['device']}, {bench['versions']['hardware']}, torch {bench['versions']['torch']}"
    return Group(Text(f"{said}; after the rate, its share of the rate of a plain copy"), table)


@torch.no_grad()
def _with_weights(module: nn.Module) -> nn.Module:
    """Give a norm a scale and a shift that show: with 1 and 0, a kernel that forgets them would be right."""
    for parameter in (module.weight, module.bias):
        if isinstance(parameter, nn.Parameter):
            parameter.copy_(0.5 + torch.rand_like(parameter))
    return module


def _loops(call: Callable[[], object], device: torch.device) -> int:
    call()
    return 1 + int(min(100, ENOUGH_S / max(wall_seconds(call, 1, device), 1e-7)))


def _call(computes: str, module: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], object]:
    """Return a function that runs one pass. ``dy`` is the incoming gradient."""
    if computes == "forward":
        return torch.no_grad()(lambda: module(x))
    leaf = x.detach().requires_grad_()
    leaves = [leaf, *module.parameters()]
    y = module(leaf)
    return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)
