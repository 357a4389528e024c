"""The kernels, and PyTorch operators of them, with shapes for the compiler and derivatives for autograd.

Arguments of a kernel in lower case are pointers to contiguous tensors, and sizes. Upper case is compiled in. Offsets
have 64 bits. ``stats`` holds the mean of every row, then the reciprocal deviation of every row, in the dtype of the
sums. The order of a row's sums depends on its width alone, so its bits do not depend on the other rows.
"""

# pyright: reportCallIssue=false, reportMissingImports=false
# A launch takes num_warps and the arguments of the kernel. Triton compiles the source of the kernels, so a checker
# must not wrap them.

import functools
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from minigpt.errors import NormError

COUNTS = ("rows", "programs")  # Triton compiles no version for 1 of these. For one round it does, without a loop
STAGES = tl.constexpr(2)  # turns of a loop in flight: one is computed while the rows of the next are loaded


@triton.jit
@no_type_check
def rows_of_turn(turn, ROWS: tl.constexpr):
    """Return the numbers (ROWS, 1) of this program's rows in this turn. The rows of all programs are adjacent."""
    program = tl.program_id(0).to(tl.int64) + turn * tl.num_programs(0).to(tl.int64)
    return program * ROWS + tl.arange(0, ROWS)[:, None]


INTERPRETED = tl.constexpr(not isinstance(rows_of_turn, triton.JITFunction))


@triton.jit
@no_type_check
def rounded(value, pointer):
    """Round ``value`` to the dtype of ``pointer``, to nearest even.

    Devices round so. The interpreter truncates to bfloat16, so the value is rounded here first.
    """
    if INTERPRETED and pointer.dtype.element_ty == tl.bfloat16:
        bits = value.to(tl.float32).to(tl.uint32, bitcast=True)
        bits += tl.where(value == value, 0x7FFF + ((bits >> 16) & 1), 0)
        value = ((bits >> 16) << 16).to(tl.float32, bitcast=True)
    return value.to(pointer.dtype.element_ty)


@triton.jit(do_not_specialize=COUNTS)
@no_type_check
def forward_rows(
    x, weight, bias, y, stats, rows, rounds,
    WIDTH: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalize ``rounds`` times ROWS rows a program. Registers hold whole rows: read once, sum twice, write once."""
    wide = stats.dtype.element_ty
    column = tl.arange(0, BLOCK)[None, :]  # (1, BLOCK)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(wide)
    if bias is not None:
        shift = tl.load(bias + column, mask=column < WIDTH, other=0.0).to(wide)
    for turn in tl.range(0, rounds, num_stages=STAGES):
        row = rows_of_turn(turn, ROWS)  # (ROWS, 1)
        inside = (row < rows) & (column < WIDTH)  # (ROWS, BLOCK)
        place = row * WIDTH + column

        value = tl.load(x + place, mask=inside, other=0.0).to(wide)
        mean = tl.sum(value, axis=1, keep_dims=True) / WIDTH  # (ROWS, 1)
        centred = tl.where(inside, value - mean, 0.0)
        rstd = tl.rsqrt(tl.sum(centred * centred, axis=1, keep_dims=True) / WIDTH + EPS)
        tl.store(stats + row, mean, mask=row < rows)
        tl.store(stats + rows + row, rstd, mask=row < rows)

        result = centred * rstd * scale
        if bias is not None:
            result += shift
        tl.store(y + place, rounded(result, y), mask=inside)


@triton.jit(do_not_specialize=COUNTS)
@no_type_check
def backward_rows(
    dy, x, weight, stats, dx, partials, rows, rounds,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute dx of ``rounds`` times ROWS rows a program, and a row of partial sums for weight and for bias.

    With s the standardized row and g = dy * weight, dx = (g - mean(g) - s * mean(g * s)) * rstd (the derivative of
    arXiv 1607.06450, equation 4). ``partials`` is (2, programs, WIDTH): first weight, then bias.
    """
    wide = stats.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]  # (1, BLOCK)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(wide)
    dweight = tl.zeros([ROWS, BLOCK], wide)
    dbias = tl.zeros([ROWS, BLOCK], wide)
    # With several rows at a time and two stages, the compiler would change the layout, and so the order of the sums.
    for turn in tl.range(0, rounds, num_stages=STAGES if ROWS == 1 else 1):
        row = rows_of_turn(turn, ROWS)
        inside = (row < rows) & (column < WIDTH)  # (ROWS, BLOCK)
        mean = tl.load(stats + row, mask=row < rows, other=0.0)
        rstd = tl.load(stats + rows + row, mask=row < rows, other=0.0)
        place = row * WIDTH + column
        value = tl.load(x + place, mask=inside, other=0.0).to(wide)
        gradient = tl.load(dy + place, mask=inside, other=0.0).to(wide)
        standard = tl.where(inside, (value - mean) * rstd, 0.0)
        scaled = gradient * scale
        along_mean = tl.sum(scaled, axis=1, keep_dims=True) / WIDTH
        along_row = tl.sum(scaled * standard, axis=1, keep_dims=True) / WIDTH
        result = (scaled - along_mean - standard * along_row) * rstd
        tl.store(dx + place, rounded(result, dx), mask=inside)
        dweight += gradient * standard
        dbias += gradient

    columns = tl.arange(0, BLOCK)
    partials += program * WIDTH + columns
    tl.store(partials, tl.sum(dweight, axis=0), mask=columns < WIDTH)
    tl.store(partials + tl.num_programs(0).to(tl.int64) * WIDTH, tl.sum(dbias, axis=0), mask=columns < WIDTH)


REGISTERS = 32 * 1024  # the most bytes of one row, in the dtype of the sums, that a program holds
FORWARD_BYTES, BACKWARD_BYTES = 4096, 2048  # of a row for each warp; fewer warps exchange less for a sum
BUSY = 16  # warps that keep a multiprocessor busy

Two = tuple[Tensor, Tensor]
Three = tuple[Tensor, Tensor, Tensor]


class Tile(NamedTuple):
    """The size of what one program holds at a time, and the number of its warps. Depends on width and dtype alone."""

    rows: int
    block: int
    warps: int


@functools.cache
def tile(width: int, wide: torch.dtype, of_warp: int) -> Tile:
    """Return the tile for rows of ``width`` numbers, with ``of_warp`` bytes for each warp.

    Raises:
        NormError: if a row does not fit into the registers of a program.
    """
    block = max(16, triton.next_power_of_2(width))
    if block * wide.itemsize > REGISTERS:
        raise NormError(f"the triton norm takes rows of at most {REGISTERS // wide.itemsize:,} numbers, got {width:,}")
    is_compiled = isinstance(forward_rows, triton.JITFunction)
    least = 1024 if is_compiled else 64 * 1024  # interpreted, a program costs the same for few rows as for many
    rows = max(1, least // block)
    return Tile(rows, block, warps=min(16, max(1, rows * block * wide.itemsize // of_warp)))


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Two:
    """Return ``y``, and means and reciprocal deviations of the rows (2, ...)."""
    y, stats = _forward_shapes(x, weight, bias, eps)
    rows, held = stats.numel() // 2, tile(weight.numel(), stats.dtype, FORWARD_BYTES)
    if rows:
        programs, rounds = _grid(rows, held, x.device)
        shift = None if bias is None else bias.contiguous()
        with torch.cuda.device_of(x):  # a kernel starts on the current device and its current stream
            forward_rows[programs,](
                x.contiguous(), weight.contiguous(), shift, y, stats, rows, rounds,
                WIDTH=weight.numel(), EPS=eps, ROWS=held.rows, BLOCK=held.block, num_warps=held.warps,
            )  # fmt: skip
    return y, stats


def _forward_shapes(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Two:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape), x.new_empty((2, *x.shape[: x.ndim - weight.ndim]), dtype=wide)


def _backward(dy: Tensor, x: Tensor, weight: Tensor, bias_dtype: torch.dtype, stats: Tensor) -> Three:
    """Return the gradients of the norm's input ``x``, of the weight and of the bias."""
    dx, width, rows = x.new_empty(x.shape), weight.numel(), stats.numel() // 2
    held = tile(width, stats.dtype, BACKWARD_BYTES)
    programs, rounds = _grid(rows, held, x.device)
    partials = x.new_empty(2, programs, width, dtype=stats.dtype)
    if rows:
        with torch.cuda.device_of(x):
            backward_rows[programs,](
                dy.contiguous(), x.contiguous(), weight.contiguous(), stats, dx, partials, rows, rounds,
                WIDTH=width, ROWS=held.rows, BLOCK=held.block, num_warps=held.warps,
            )  # fmt: skip
    dweight, dbias = (of_programs.sum(0).view(weight.shape) for of_programs in partials)
    return dx, dweight.to(weight.dtype), dbias.to(bias_dtype)


def _backward_shapes(dy: Tensor, x: Tensor, weight: Tensor, bias_dtype: torch.dtype, stats: Tensor) -> Three:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape, dtype=bias_dtype)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.has_bias, ctx.bias_dtype = bias is not None, weight.dtype if bias is None else bias.dtype


def _backward_gradients(ctx: Any, dy: Tensor, dstats: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, stats = ctx.saved_tensors
    dx, dweight, dbias = torch.ops.minigpt.layer_norm_backward(dy, x, weight, ctx.bias_dtype, stats)
    return dx, dweight, dbias if ctx.has_bias else None, None


def _refuse_second_derivative(ctx: Any, *gradients: Tensor | None) -> None:
    raise NormError("the triton norm has first derivatives only; for second ones use norm 'fused' or 'textbook'")


@functools.cache
def _busy(device: torch.device, warps: int) -> int:
    """Return how many programs keep the device busy."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count * max(1, BUSY // warps)


def _grid(rows: int, held: Tile, device: torch.device) -> tuple[int, int]:
    """Return the number of programs, and how many tiles each takes."""
    tiles = -(-rows // held.rows)
    programs = min(tiles, _busy(device, held.warps))
    return programs, -(-tiles // max(programs, 1))


for name, compute, shapes in (
    ("minigpt::layer_norm", _forward, _forward_shapes),
    ("minigpt::layer_norm_backward", _backward, _backward_shapes),
):
    torch.library.define(name, torch.library.infer_schema(compute, mutates_args=()))
    torch.library.impl(name, ("cpu", "cuda"), compute)
    torch.library.register_fake(name, shapes)
torch.library.register_autograd("minigpt::layer_norm", _backward_gradients, setup_context=_remember)
torch.library.register_autograd("minigpt::layer_norm_backward", _refuse_second_derivative)
layer_norm = torch.ops.minigpt.layer_norm  # of x, weight, bias and eps; returns y and stats; differentiable once
