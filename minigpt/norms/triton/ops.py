"""The kernels as PyTorch operators, with shapes for the compiler and derivatives for autograd."""

# pyright: reportCallIssue=false
# A launch takes num_warps beside the arguments of the kernel.

import functools
from typing import Any, NamedTuple

import torch
import triton  # pyright: ignore[reportMissingImports]
from jaxtyping import Float
from torch import Tensor

from minigpt.errors import NormError
from minigpt.norms.triton import kernels

REGISTERS = 32 * 1024  # the most bytes of one row, in the dtype of the sums, that a program holds
FORWARD_BYTES, BACKWARD_BYTES = 4096, 2048  # of a row for each warp; fewer warps exchange less for a sum
BUSY = 16  # warps that keep a multiprocessor busy

Maybe = Tensor | None
Three = tuple[Tensor, Tensor, Tensor]
Stream = Float[Tensor, "*dims"]
Scale = Float[Tensor, "*row"]


def layer_norm(x: Stream, weight: Scale, bias: Scale | None, eps: float) -> Stream:
    """Return LayerNorm of ``x`` over the dimensions of ``weight``; differentiable once."""
    return torch.ops.minigpt.layer_norm(x, None, weight, bias, eps)[0]


def add_layer_norm(
    residual: Stream, delta: Stream, weight: Scale, bias: Scale | None, eps: float
) -> tuple[Stream, Stream]:
    """Return ``residual + delta``, and LayerNorm of that sum."""
    if residual.dtype != delta.dtype:  # in one kernel, two dtypes would change the order of the sums
        total = residual + delta
        return total, layer_norm(total, weight, bias, eps)
    y, total, _ = torch.ops.minigpt.layer_norm(residual, delta, weight, bias, eps)
    return total, y


class Tile(NamedTuple):
    """How much one program holds at a time, and how many warps share it. Depends on width and dtype alone."""

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
    is_compiled = isinstance(kernels.forward_rows, triton.JITFunction)
    least = 1024 if is_compiled else 64 * 1024  # interpreted, a program costs the same for few rows as for many
    rows = max(1, least // block)
    return Tile(rows, block, warps=min(16, max(1, rows * block * wide.itemsize // of_warp)))


def _forward(x: Tensor, delta: Maybe, weight: Tensor, bias: Maybe, eps: float) -> Three:
    """Return ``y``, ``total`` (empty without a ``delta``), and means and reciprocal deviations of the rows (2, ...)."""
    width, held = weight.numel(), tile(weight.numel(), _wide(x.dtype), FORWARD_BYTES)
    y, total, stats = _forward_shapes(x, delta, weight, bias, eps)
    rows = stats.numel() // 2
    if rows:
        blocks = -(-rows // held.rows)
        programs = min(blocks, _programs(x.device, held.warps))
        with torch.cuda.device_of(x):  # a kernel starts on the current device and its current stream
            kernels.forward_rows[programs,](
                x.contiguous(), _contiguous(delta), weight.contiguous(), _contiguous(bias), total, y, stats,
                rows, -(-blocks // programs),
                WIDTH=width, EPS=eps, ROWS=held.rows, BLOCK=held.block, num_warps=held.warps,
            )  # fmt: skip
    return y, total, stats


def _forward_shapes(x: Tensor, delta: Maybe, weight: Tensor, bias: Maybe, eps: float) -> Three:
    stats = x.new_empty((2, *x.shape[: x.ndim - weight.ndim]), dtype=_wide(x.dtype))
    return x.new_empty(x.shape), x.new_empty(0 if delta is None else x.shape), stats


def _backward(dy: Tensor, dtotal: Maybe, x: Tensor, weight: Tensor, bias_dtype: torch.dtype, stats: Tensor) -> Three:
    """Return the gradients of the norm's input ``x``, of the weight and of the bias."""
    dx, width, rows = x.new_empty(x.shape), weight.numel(), stats.numel() // 2
    held = tile(width, stats.dtype, BACKWARD_BYTES)
    blocks = -(-rows // held.rows)
    programs = min(blocks, _programs(x.device, held.warps))
    partials = x.new_empty(2, programs, width, dtype=stats.dtype)
    if rows:
        with torch.cuda.device_of(x):
            kernels.backward_rows[programs,](
                dy.contiguous(), _contiguous(dtotal), x.contiguous(), weight.contiguous(), stats, dx,
                partials, rows, -(-blocks // programs),
                WIDTH=width, ROWS=held.rows, BLOCK=held.block, num_warps=held.warps,
            )  # fmt: skip
    dweight, dbias = (of_programs.sum(0).view(weight.shape) for of_programs in partials)
    return dx, dweight.to(weight.dtype), dbias.to(bias_dtype)


def _backward_shapes(
    dy: Tensor, dtotal: Maybe, x: Tensor, weight: Tensor, bias_dtype: torch.dtype, stats: Tensor
) -> Three:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape, dtype=bias_dtype)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, delta, weight, bias, _ = inputs
    _, total, stats = output
    ctx.save_for_backward(x if delta is None else total, weight, stats)
    ctx.has_delta, ctx.has_bias = delta is not None, bias is not None
    ctx.bias_dtype = weight.dtype if bias is None else bias.dtype
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dy: Tensor | None, dtotal: Tensor | None, dstats: None) -> tuple[Tensor | None, ...]:
    x, weight, stats = ctx.saved_tensors
    dy = torch.zeros_like(x) if dy is None else dy
    dtotal = dtotal if ctx.has_delta else None
    dx, dweight, dbias = torch.ops.minigpt.layer_norm_backward(dy, dtotal, x, weight, ctx.bias_dtype, stats)
    return dx, dx if ctx.has_delta else None, dweight, dbias if ctx.has_bias else None, None


def _refuse(ctx: Any, *gradients: Tensor | None) -> None:
    raise NormError("the triton norm has first derivatives only; for second ones use norm 'fused' or 'textbook'")


def _contiguous(tensor: Maybe) -> Maybe:
    return None if tensor is None else tensor.contiguous()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@functools.cache
def _programs(device: torch.device, warps: int) -> int:
    """Return how many programs keep the device busy."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count * max(1, BUSY // warps)


for name, compute, shapes in (
    ("minigpt::layer_norm", _forward, _forward_shapes),
    ("minigpt::layer_norm_backward", _backward, _backward_shapes),
):
    torch.library.define(name, torch.library.infer_schema(compute, mutates_args=()))
    torch.library.impl(name, ("cpu", "cuda"), compute)
    torch.library.register_fake(name, shapes)
torch.library.register_autograd("minigpt::layer_norm", _gradients, setup_context=_remember)
torch.library.register_autograd("minigpt::layer_norm_backward", _refuse)
