"""LayerNorm as the textbook writes it, and as one library call. Other norms here inherit from the first."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from minigpt.norms.registry import register

RowShape = int | list[int] | torch.Size  # as in torch.nn.LayerNorm
Vectors = Float[Tensor, "*dims"]  # (..., *normalized_shape)


@register("textbook")
class LayerNorm(nn.LayerNorm):
    """Layer normalization (Ba, Kiros & Hinton 2016, arXiv 1607.06450, equations 3 and 4).

    Each row, the trailing ``normalized_shape`` of the input, is moved to mean 0, scaled to variance 1, and then scaled
    and shifted by what was learned::

        y = (x - mean) / sqrt(var + eps) * weight + bias

    It is constructed as ``torch.nn.LayerNorm`` is, and optimizers recognize it as one.

    Args:
        normalized_shape: the trailing dimensions that are one row: an int, or several of them.
        eps: added to the variance, so that a constant row divides by sqrt(eps) and not by 0.
        elementwise_affine: whether there is a scale, and a shift if ``bias`` is True too.
        bias: whether there is a shift.
        device, dtype: of the Parameters.

    Parameters: ``weight`` (initially 1, or None) and ``bias`` (initially 0, or None), of shape ``normalized_shape``.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: Vectors) -> Vectors:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Normalize ``x`` (..., *normalized_shape); same shape and dtype out, statistics in float32 or wider."""
        # Half precision cannot hold a sum of squares, so widen before and narrow after.
        wide = torch.promote_types(x.dtype, torch.float32)
        y = self.standardize(x.to(wide))
        if self.weight is not None:
            y = y * self.weight
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype)

    def standardize(self, x: Vectors) -> Vectors:
        """Return the row at mean 0 and variance 1, before its learned scale and shift. A variant replaces this step."""
        mean = x.mean(dim=self.row_dims, keepdim=True)  # (..., 1)
        squares = (x - mean).square()
        var = squares.mean(dim=self.row_dims, keepdim=True)  # (..., 1), biased: divided by n, not n - 1
        return (x - mean) / torch.sqrt(var + self.eps)

    @property
    def row_dims(self) -> tuple[int, ...]:
        """The dimensions that are one row, as reductions take them: (-1,) for a vector."""
        return tuple(range(-len(self.normalized_shape), 0))


@register("fused")
class FusedLayerNorm(LayerNorm):
    """The same values as ``LayerNorm`` from one kernel that reads the input once; statistics in float32 or wider."""

    def forward(self, x: Vectors) -> Vectors:
        """Normalize ``x`` (..., *normalized_shape); same shape and dtype out.

        Rows may have another dtype than the scale, as Mamba's float32 residual stream in a bfloat16 model. All are
        widened then, and the output is rounded once.
        """
        if self.weight is None or self.weight.dtype == x.dtype:
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        wide = torch.promote_types(torch.promote_types(x.dtype, self.weight.dtype), torch.float32)
        bias = None if self.bias is None else self.bias.to(wide)
        return F.layer_norm(x.to(wide), self.normalized_shape, self.weight.to(wide), bias, self.eps).to(x.dtype)
