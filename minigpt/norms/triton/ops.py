"""The kernels as operators of PyTorch's, with shapes for its compiler and derivatives for autograd."""

# pyright: reportCallIssue=false
# A launch takes num_warps beside what the kernel itself does.

import functools
from typing import Any, NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
from jaxtyping import Float
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor
from torch.autograd import forward_ad

from minigpt.errors import NormError
from minigpt.norms.triton import interpreting, kernels

REGISTERS = 32 * 1024  # bytes of one row, as its statistics are kept, that a program may hold; longer rows go in pieces
LONG_BLOCK = 2048  # elements of one piece
FORWARD_BYTES, BACKWARD_BYTES = 4096, 2048  # of a row, for each warp: the fewer warps, the less they exchange to sum
BUSY = 16  # warps that keep a multiprocessor busy, since rows are asked for ahead
SUM_ROWS, SUM_BLOCK = 512, 16  # of partial sums that are added up at a time: few turns, by many programs

Stream = Float[Tensor, "*dims"]
Row = Float[Tensor, "*row"]


def layer_norm(x: Stream, weight: Row, bias: Row | None, eps: float) -> Stream:
    """LayerNorm of ``x`` over the dimensions of ``weight``; differentiable once."""
    _require_no_tangent(x, weight, bias)
    return torch.ops.minigpt.layer_norm(x, None, weight, bias, eps)[0]


def add_layer_norm(residual: Stream, delta: Stream, weight: Row, bias: Row | None, eps: float) -> tuple[Stream, Stream]:
    """``residual + delta``, and LayerNorm of that sum."""
    _require_no_tangent(residual, delta, weight, bias)
    y, total, _ = torch.ops.minigpt.layer_norm(residual, delta, weight, bias, eps)
    return total, y


def _require_no_tangent(*given: Tensor | None) -> None:
    """Refuse forward-mode derivatives, which would be lost in an operator that has none."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(tensor is not None and forward_ad.unpack_dual(_unbatched(tensor)).tangent is not None for tensor in given):
        raise NormError("the triton norm has no forward-mode derivatives; for those take norm 'fused' or 'textbook'")


def _unbatched(tensor: Tensor) -> Tensor:
    while is_batchedtensor(tensor):  # by vmap, which cannot be asked for a tangent
        tensor = get_unwrapped(tensor)
    return tensor


class Rows(NamedTuple):
    """Where the rows of a tensor lie: its elements, and how to find row i (see ``kernels``)."""

    data: Tensor
    inner: int
    outer_stride: int
    inner_stride: int

    @property
    def place(self) -> tuple[int, int, int]:
        return self.inner, self.outer_stride, self.inner_stride


class Tile(NamedTuple):
    """How much one program holds at a time, and how many warps share it: by width and dtype alone."""

    rows: int
    block: int
    warps: int


def rows_of(x: Tensor, row_ndim: int) -> Rows:
    """The rows as they lie, where two strides can find them; of a stranger layout, a contiguous copy's.

    Where one stride is enough, ``inner`` is 1, which is compiled in and spares the kernels a division. A single row has
    the stride that several would have, so that one program serves both and the row comes out the same in any company.
    """
    x = x if row_ndim == 1 else x.flatten(-row_ndim)
    *leading, width = x.shape
    if x.is_contiguous():
        return Rows(x, 1, width, 0)
    dims: list[tuple[int, int]] = []
    for size, stride in zip(leading, x.stride(), strict=False):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    if len(dims) > 2 or (width > 1 and x.stride(-1) != 1):
        return Rows(x.contiguous(), 1, width, 0)
    (_, outer_stride), (inner, inner_stride) = [*dims, (1, 0)][:2]
    return Rows(x, inner, outer_stride, inner_stride)


@functools.cache
def tile(width: int, wide: torch.dtype, of_warp: int) -> Tile | None:
    """For rows of ``width``, ``of_warp`` bytes for each warp; None where a row does not fit into registers."""
    block = max(16, triton.next_power_of_2(width))
    if block * wide.itemsize > REGISTERS:
        return None
    least = 64 * 1024 if interpreting() else 1024  # interpreted, a program costs the same for few rows as for many
    rows = max(1, least // block)
    return Tile(rows, block, warps=min(16, max(1, rows * block * wide.itemsize // of_warp)))


def _forward(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``y``, ``total`` (empty without a ``delta``), and the rows' means and reciprocal deviations (2, ...)."""
    width, held = weight.numel(), tile(weight.numel(), _wide(_sum_dtype(x, delta)), FORWARD_BYTES)
    if delta is not None and (held is None or delta.dtype != x.dtype):  # of two dtypes, sums would take another order
        total = (x + delta).contiguous()
        y, _, stats = _forward(total, None, weight, bias, eps)
        return y, total, stats
    y, total, stats = _forward_shapes(x, delta, weight, bias, eps)
    rows = stats.numel() // 2
    source, weight, bias = rows_of(x, weight.ndim), weight.contiguous(), None if bias is None else bias.contiguous()
    added = Rows(x, 1, 0, 0) if delta is None else rows_of(delta, weight.ndim)
    with torch.cuda.device_of(x):  # a kernel starts on the current device and its current stream
        if not rows:
            pass
        elif held is None:
            kernels.forward_long[rows,](
                source.data, weight, bias, y, stats, rows, *source.place,
                WIDTH=width, EPS=eps, BLOCK=LONG_BLOCK, num_warps=8,
            )  # fmt: skip
        else:
            blocks = -(-rows // held.rows)
            programs = min(blocks, _programs(x.device, held.warps))
            kernels.forward_rows[programs,](
                source.data, None if delta is None else added.data, weight, bias, total, y, stats, rows,
                -(-blocks // programs), *source.place, *added.place,
                WIDTH=width, EPS=eps, ROWS=held.rows, BLOCK=held.block, num_warps=held.warps,
            )  # fmt: skip
    return y, total, stats


def _forward_shapes(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = _sum_dtype(x, delta)
    y = x.new_empty(x.shape, dtype=dtype)
    total = x.new_empty(0 if delta is None else x.shape, dtype=dtype)
    stats = x.new_empty((2, *x.shape[: x.ndim - weight.ndim]), dtype=_wide(dtype))
    return y, total, stats


def _backward(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor, bias_dtype: torch.dtype, stats: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the sum ``x`` (what went into the norm), of the weight and of the bias."""
    dx, dweight, dbias = _backward_shapes(dy, dtotal, x, weight, bias_dtype, stats)
    width, rows, held = weight.numel(), stats.numel() // 2, tile(weight.numel(), stats.dtype, BACKWARD_BYTES)
    source, above = rows_of(x, weight.ndim), rows_of(dy, weight.ndim)
    beside = Rows(x, 1, 0, 0) if dtotal is None else rows_of(dtotal, weight.ndim)
    piece = held or Tile(1, LONG_BLOCK, 8)
    blocks = -(-rows // piece.rows)
    programs = min(blocks, _programs(x.device, piece.warps))
    partials = x.new_empty(2, programs, width, dtype=stats.dtype)
    given = (above.data, None if dtotal is None else beside.data, source.data, weight.contiguous(), stats, dx)
    places = (*above.place, *beside.place, *source.place)
    with torch.cuda.device_of(x):
        if not rows:
            pass
        elif held is not None:
            kernels.backward_rows[programs,](
                *given, partials, rows, -(-blocks // programs), *places,
                WIDTH=width, ROWS=held.rows, BLOCK=held.block, num_warps=held.warps,
            )  # fmt: skip
        else:
            kernels.backward_long[rows,](*given, rows, *places, WIDTH=width, BLOCK=LONG_BLOCK, num_warps=8)
            kernels.backward_long_weights[programs, -(-width // LONG_BLOCK)](
                above.data, source.data, stats, partials, rows, -(-blocks // programs), *above.place, *source.place,
                WIDTH=width, ROWS=1, BLOCK=LONG_BLOCK, num_warps=8,
            )  # fmt: skip
        columns = LONG_BLOCK if interpreting() else SUM_BLOCK
        kernels.sum_partials[-(-width // columns), 2](
            partials, dweight, dbias, programs, WIDTH=width, ROWS=SUM_ROWS, BLOCK=columns, num_warps=8
        )
    return dx, dweight, dbias


def _backward_shapes(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor, bias_dtype: torch.dtype, stats: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape, dtype=bias_dtype)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, delta, weight, bias, _ = inputs
    _, total, stats = output
    ctx.save_for_backward(x if delta is None else total, weight, stats)
    ctx.has_bias = bias is not None
    ctx.dtypes = x.dtype, None if delta is None else delta.dtype, weight.dtype if bias is None else bias.dtype
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None, dtotal: Tensor | None, dstats: None) -> tuple[Tensor | None, ...]:
    x, weight, stats = ctx.saved_tensors
    x_dtype, delta_dtype, bias_dtype = ctx.dtypes
    dy = torch.zeros_like(x) if dy is None else dy
    dtotal = None if delta_dtype is None else dtotal
    dx, dweight, dbias = torch.ops.minigpt.layer_norm_backward(dy, dtotal, x, weight, bias_dtype, stats)
    ddelta = None if delta_dtype is None else dx.to(delta_dtype)
    return dx.to(x_dtype), ddelta, dweight, dbias if ctx.has_bias else None, None


def _refuse(ctx: Any, *gradients: Tensor | None) -> None:
    raise NormError("the triton norm has first derivatives only; for second ones take norm 'fused' or 'textbook'")


def _sum_dtype(x: Tensor, delta: Tensor | None) -> torch.dtype:
    return x.dtype if delta is None else torch.promote_types(x.dtype, delta.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@functools.cache
def _programs(device: torch.device, warps: int) -> int:
    """How many programs keep the device busy."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count * max(1, BUSY // warps)


torch.library.define(
    "minigpt::layer_norm",
    "(Tensor x, Tensor? delta, Tensor weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "minigpt::layer_norm_backward",
    "(Tensor dy, Tensor? dtotal, Tensor x, Tensor weight, ScalarType bias_dtype, Tensor stats)"
    " -> (Tensor, Tensor, Tensor)",
)
torch.library.impl("minigpt::layer_norm", ("cpu", "cuda"), _forward)
torch.library.impl("minigpt::layer_norm_backward", ("cpu", "cuda"), _backward)
torch.library.register_fake("minigpt::layer_norm", _forward_shapes)
torch.library.register_fake("minigpt::layer_norm_backward", _backward_shapes)
torch.library.register_autograd("minigpt::layer_norm", _gradients, setup_context=_remember)
torch.library.register_autograd("minigpt::layer_norm_backward", _refuse)
