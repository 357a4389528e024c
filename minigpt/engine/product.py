"""The affine product, by the library call that is fastest for this processor.

R rows: every token of a batch is one.
"""

import itertools
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.device import HAS_ONEDNN, PREFERS_ONEDNN, SLOW_HALVES

PIECE = 2048  # columns of a weight whose float32 copy stays in the cache until it is multiplied

linear_pointwise: Any = torch.ops.mkldnn._linear_pointwise.default if HAS_ONEDNN else None  # oneDNN's ``F.linear``


def product(
    x: Float[Tensor, "batch seq inp"], weight: Float[Tensor, "inp out"], bias: Float[Tensor, " out"] | None = None
) -> Float[Tensor, "batch seq out"]:
    """Return ``x W + b``."""
    infers, is_compiling = not torch.is_grad_enabled(), torch.compiler.is_compiling()
    if infers and x.is_cpu and x.dtype == weight.dtype and not torch.is_autocast_enabled("cpu"):
        # oneDNN's call has no derivative. A compiler cannot ask for the inference mode.
        if PREFERS_ONEDNN and x.dtype == torch.float32 and (is_compiling or torch.is_inference_mode_enabled()):
            return onednn_linear(x, weight.t(), bias)
        if x.dtype in SLOW_HALVES:  # converting the weight is faster than multiplying it
            return in_float32(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])  # (R, in)
    y = torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)  # (R, out)
    return y.reshape(*x.shape[:-1], -1)


def in_float32(
    x: Float[Tensor, "batch seq inp"], weight: Float[Tensor, "inp out"], bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "batch seq out"]:
    """The product in float32, rounded once, one piece of the weight after the other."""
    wide, count = x.float(), -(-weight.shape[1] // PIECE)
    shifts = itertools.repeat(None) if bias is None else bias.float().chunk(count)
    pieces = zip(weight.chunk(count, dim=1), shifts, strict=False)
    return torch.cat([product(wide, columns.float(), shift).to(x.dtype) for columns, shift in pieces], dim=-1)


def onednn_linear(
    x: Float[Tensor, "*dims inp"], weight: Float[Tensor, "out inp"], bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "*dims out"]:
    """``F.linear`` by oneDNN, for a weight of any layout. It has no derivative."""
    if torch.compiler.is_compiling():  # the compiler would make the weight a constant of its program
        return torch.ops.minigpt.onednn_linear(x, weight, bias)
    return _onednn_linear(x, weight, bias)


def _onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is not None and not bias.is_contiguous():
        bias = bias.contiguous()  # oneDNN would read it as if it were contiguous
    return linear_pointwise(x, weight, bias, "none", [], "")


torch.library.define("minigpt::onednn_linear", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
torch.library.impl("minigpt::onednn_linear", "cpu", _onednn_linear)


@torch.library.register_fake("minigpt::onednn_linear")
def _onednn_linear_shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))
