"""Time norms: forward, backward, and with the residual addition.

A norm cannot be faster than memory. So every time is also given in bytes a second, and as a share of the rate of a
plain copy of the input in the same run. Several inputs take turns, so that no cache holds them.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from minigpt import norms
from minigpt.bench.norm_contestants import CONTESTANTS, in_float64, module_of, present, strict_compiler
from minigpt.errors import ConfigError, NormError
from minigpt.measure.environment import versions
from minigpt.measure.steps import Progress, Steps
from minigpt.measure.stopwatch import Spread, gpu_seconds, in_turns, wall_seconds
from minigpt.placement import dtype_name, require_values, resolve_device, resolve_dtype

WIDTHS = (768, 1024, 1280, 1600, 4096, 8192)
ROWS = {"cuda": (1, 64, 1024, 16_384, 65_536, 262_144), "cpu": (1, 64, 1024)}
PASSES = ("forward", "backward", "add_norm")
COLD, MOST_INPUTS = 2**28, 16  # bytes and number of the inputs that take turns; the smaller limit holds
# Rows that are checked. For more, float64 copies would not fit, and a CPU's sums over rows in the dtype would be off.
CHECKED = {"cuda": 4096, "cpu": 64}
STREAMS = {"forward": 2, "backward": 3, "add_norm": 4}  # tensors of the input's size that are read or written
TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.bfloat16: 4e-2,
    torch.float16: 5e-3,
}  # relative to the largest value


class NotTimed(NormError):
    """Raised if a contestant's results are wrong.

    Attributes:
        norm: the contestant's name.
    """

    def __init__(self, message: str, norm: str = "") -> None:
        super().__init__(message)
        self.norm = norm


@dataclasses.dataclass(frozen=True)
class Timing:
    """One contestant at one shape: median times in milliseconds, rates in 10^9 bytes a second.

    ``ms`` is the device's time. ``call_ms`` is the caller's time for one of many calls in a row. On a GPU it
    is longer if Python is slower than the device.
    """

    norm: str
    computes: str
    width: int
    rows: int
    ms: float
    ms_p20: float
    ms_p80: float
    gb_per_s: float
    share_of_copy: float
    call_ms: float


@dataclasses.dataclass(frozen=True)
class NormBench:
    """The timings, and the machine."""

    device: str
    dtype: str
    versions: dict[str, Any]
    absent: dict[str, str]  # contestants that cannot run here, and why
    timings: list[Timing]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return dataclasses.asdict(self)


def bench_norms(
    *,
    contestants: Iterable[str] = CONTESTANTS,
    widths: Iterable[int] = WIDTHS,
    rows: Iterable[int] | None = None,
    passes: Iterable[str] = PASSES,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    repeats: int = 20,
    progress: Progress | None = None,
) -> NormBench:
    """Time norms in turns, after a check that each equals LayerNorm in float64 to within the dtype's rounding.

    Args:
        contestants: "torch" (its layer_norm), "compiled" (the textbook norm under torch.compile), "liger", or any norm
            that ``norms.build`` takes. "triton" and "liger" are left out if they cannot run here; ``absent`` says why.
        widths: numbers in a row.
        rows: numbers of rows; by default 1 to 262,144 on CUDA and fewer on a CPU.
        passes: any of "forward", "backward" and "add_norm".
        device: CUDA by default if there is one, else the CPU.
        dtype: bfloat16 on CUDA by default, and float32 on a CPU.
        repeats: rounds; each contestant is timed once in a round.
        progress: called with the name of each step, and the share of steps done.

    Raises:
        NormError: if a contestant is unknown.
        NotTimed: if its results are wrong.
        ConfigError: if the device is absent, or a pass, a width, or a number of rows or repeats is out of range.
    """
    device = resolve_device(device)
    require_values(device)
    dtype = resolve_dtype(dtype) or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    widths, passes = list(widths), list(passes)
    rows = list(ROWS.get(device.type, ROWS["cpu"]) if rows is None else rows)
    _require_sensible(widths, rows, passes, repeats)
    makers, absent = present(list(contestants), device)
    timings = []
    begin = Steps(progress, total=len(widths) * len(rows) * len(passes))
    with strict_compiler() if "compiled" in makers else contextlib.nullcontext():
        for width in widths:
            modules = {name: module_of(make, width, device, dtype) for name, make in makers.items()}
            for count, computes in itertools.product(rows, passes):
                begin(f"{computes}, {count:,} rows of {width}")
                timings += _timed(modules, computes, width, count, device, dtype, repeats)
    return NormBench(str(device), dtype_name(dtype), versions(device), absent, timings)


def _timed(
    modules: dict[str, nn.Module], computes: str, width: int, rows: int, device: torch.device, dtype: torch.dtype,
    repeats: int,
) -> list[Timing]:  # fmt: skip
    count = min(MOST_INPUTS, -(-COLD // (rows * width * dtype.itemsize)))
    inputs = [tuple(torch.randn(rows, width, device=device).to(dtype) for _ in range(2)) for _ in range(count)]
    x, other = inputs[0]
    checked = CHECKED.get(device.type, CHECKED["cpu"])
    seen = x[-checked:], other[-checked:]
    truth = in_float64(next(iter(modules.values())))
    wanted = _results(_call(computes, truth, *(part.double() for part in seen))())
    for name, module in modules.items():
        _require_right(name, computes, _results(_call(computes, module, *seen)()), wanted, dtype)
    calls = {name: _in_turn([_call(computes, module, *given) for given in inputs]) for name, module in modules.items()}
    room = torch.empty_like(x)
    copy = _in_turn([functools.partial(room.copy_, source) for source, _ in inputs])
    clocks = {name: _clocked(call, device) for name, call in {"copy": copy, **calls}.items()}
    taken = in_turns(clocks, range(repeats))
    copied = 2 * x.nbytes / statistics.median(seconds for seconds, _ in taken.pop("copy"))
    return [_timing(name, computes, width, rows, times, STREAMS[computes] * x.nbytes, copied)
            for name, times in taken.items()]  # fmt: skip


def _timing(
    name: str, computes: str, width: int, rows: int, times: list[tuple[float, float]], moved: int, copied: float
) -> Timing:
    seconds, calls = zip(*times, strict=True)
    of = Spread.of(seconds)
    rate = moved / of.median  # bytes a second
    return Timing(name, computes, width, rows, 1e3 * of.median, 1e3 * of.p20, 1e3 * of.p80, rate / 1e9, rate / copied,
                  1e3 * statistics.median(calls))  # fmt: skip


def _clocked(call: Callable[[], object], device: torch.device) -> Callable[[], tuple[float, float]]:
    """Return a function that measures seconds a call for the device and for the caller, over many calls."""
    call()
    loops = max(1, min(100, math.ceil(2e-3 / max(wall_seconds(call, 1, device), 1e-7))))

    def clocked() -> tuple[float, float]:
        waited = wall_seconds(call, loops, device)
        # A GPU's own clock needs fewer calls.
        return gpu_seconds(call, min(20, loops), device) if device.type == "cuda" else waited, waited

    return clocked


def _in_turn(calls: list[Callable[[], object]]) -> Callable[[], object]:
    """Return a function that calls the next of these each time."""
    following = itertools.cycle(calls)
    return lambda: next(following)()


def _call(computes: str, module: nn.Module, x: Tensor, other: Tensor) -> Callable[[], Any]:
    """Return a function that runs one pass. ``other`` is the incoming gradient, or what is added to ``x``."""
    if computes == "forward":
        return torch.no_grad()(lambda: module(x))
    if computes == "add_norm":
        return torch.no_grad()(lambda: norms.add_norm(module, x, other))
    leaf = x.detach().requires_grad_()
    leaves = [leaf, *module.parameters()]
    with torch.enable_grad():
        y = module(leaf)
    return lambda: torch.autograd.grad(y, leaves, other, retain_graph=True)


def _results(given: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (given,) if isinstance(given, Tensor) else tuple(given)


def _require_right(
    name: str, computes: str, found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], dtype: torch.dtype
) -> None:
    for one, other in zip(found, wanted, strict=True):
        error, scale = (one.double() - other).abs().max().item(), other.abs().max().item()
        if not error <= TOLERANCES[dtype] * max(scale, 1.0):
            raise NotTimed(
                f"{name} is not timed: its {computes} is off by {error:.3g}, on values up to {scale:.3g}, "
                f"where {dtype_name(dtype)} allows {TOLERANCES[dtype] * max(scale, 1.0):.3g}",
                norm=name,
            )


def _require_sensible(widths: list[int], rows: list[int], passes: list[str], repeats: int) -> None:
    if not widths or not rows or min(*widths, *rows, repeats) < 1 or max(*widths, *rows) >= 2**31 or repeats < 2:
        raise ConfigError("widths and rows must be 1 or more and below 2^31, and repeats 2 or more")
    if unknown := set(passes) - set(PASSES) or (not passes and {"none"}):
        raise ConfigError(f"unknown passes: {', '.join(sorted(unknown))}; known are {', '.join(PASSES)}")
