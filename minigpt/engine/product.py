"""The affine product, by the library call that is fastest for this processor.

R rows: every token of a batch is one.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.machine import HAS_ONEDNN, PREFERS_ONEDNN, SLOW_HALVES

PIECE = 2048  # columns of a weight whose float32 copy stays in the cache until it is multiplied

linear_pointwise: Any = torch.ops.mkldnn._linear_pointwise.default if HAS_ONEDNN else None  # oneDNN's ``F.linear``


def product(
    x: Float[Tensor, "batch seq inp"], weight: Float[Tensor, "inp out"], bias: Float[Tensor, " out"] | None = None
) -> Float[Tensor, "batch seq out"]:
    """Return ``x W + b``."""
    if may_replace_addmm(x, weight):
        if PREFERS_ONEDNN and x.dtype == torch.float32 and torch.is_inference_mode_enabled():
            return onednn_linear(x, weight.t(), bias)
        if x.dtype in SLOW_HALVES:  # converting the weight is faster than multiplying it
            return in_float32(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])  # (R, in)
    y = torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)  # (R, out)
    return y.reshape(*x.shape[:-1], -1)


def may_replace_addmm(x: Tensor, weight: Tensor) -> bool:
    """Return True on the CPU where no gradient, autocast or compiler needs PyTorch's operator."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return False
    return x.is_cpu and x.dtype == weight.dtype


def in_float32(
    x: Float[Tensor, "batch seq inp"], weight: Float[Tensor, "inp out"], bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "batch seq out"]:
    """Return the product, computed in float32 and rounded once, in pieces of the weight."""
    wide = x.float()
    count = math.ceil(weight.shape[1] / PIECE)
    shifts: Sequence[Tensor | None] = [None] * count
    if bias is not None:
        shifts = bias.float().chunk(count)
    outputs: list[Tensor] = []
    for columns, shift in zip(weight.chunk(count, dim=1), shifts, strict=False):  # there may be fewer chunks than count
        y = product(wide, columns.float(), shift)
        outputs.append(y.to(x.dtype))
    return torch.cat(outputs, dim=-1)


def onednn_linear(
    x: Float[Tensor, "*dims inp"], weight: Float[Tensor, "out inp"], bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "*dims out"]:
    """``F.linear`` by oneDNN, for a weight of any layout. It has no derivative."""
    if bias is not None:
        bias = bias.contiguous()  # oneDNN reads it as if it were contiguous
    return linear_pointwise(x, weight, bias, "none", [], "")
