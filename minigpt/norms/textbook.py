"""LayerNorm as the textbook writes it. Every other norm here inherits its parameters and replaces its arithmetic."""

import operator
from collections.abc import Iterable, Sequence
from numbers import Real

import torch
from jaxtyping import Float
from torch import Tensor, nn

from minigpt.errors import NormError
from minigpt.norms.registry import register


@register("textbook")
class LayerNorm(nn.LayerNorm):
    """Layer normalization (Ba, Kiros & Hinton 2016, arXiv 1607.06450, equations 3 and 4).

    Each row, the trailing ``normalized_shape`` of the input, is moved to mean 0, scaled to variance 1, and then scaled
    and shifted by what was learned::

        y = (x - mean) / sqrt(var + eps) * weight + bias

    Args:
        normalized_shape: the trailing dimensions that are one row: an int, or several of them.
        eps: added to the variance, so that a constant row divides by sqrt(eps) and not by 0.
        bias: whether there is a shift.

    Parameters: ``weight`` (initially 1) and ``bias`` (initially 0, or None), both of shape ``normalized_shape``.

    It inherits from ``torch.nn.LayerNorm`` in name only, so that whoever treats norms apart from other layers finds it:
    an optimizer that decays all weights but theirs, for one.

    Raises:
        NormError: a size below 1, a negative eps, or (in forward) an input that does not end in ``normalized_shape`` or
            is no floating-point numbers.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, normalized_shape: int | Sequence[int], eps: float = 1e-5, bias: bool = True) -> None:
        nn.Module.__init__(self)
        self.normalized_shape = row_shape(normalized_shape)
        if not isinstance(eps, Real) or not 0 <= eps < float("inf"):
            raise NormError(f"eps must be a finite number, 0 or more, not {eps!r}")
        self.eps, self.elementwise_affine = eps, True
        self.weight = nn.Parameter(torch.ones(self.normalized_shape))
        self.bias = nn.Parameter(torch.zeros(self.normalized_shape)) if bias else None

    def forward(self, x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Normalize ``x`` (..., *normalized_shape); same shape and dtype out, statistics in float32 or wider."""
        self._check_input(x)
        # (..., *normalized_shape); half precision cannot hold a sum of squares, so widen before and narrow after
        y = self.standardize(x.to(torch.promote_types(x.dtype, torch.float32)))
        y = y * self.weight
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype)

    def standardize(self, x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
        """The row before its learned scale and shift: mean 0, variance 1. A variant replaces this step."""
        mean = x.mean(dim=self.row_dims, keepdim=True)  # (..., 1)
        var = (x - mean).square().mean(dim=self.row_dims, keepdim=True)  # (..., 1), biased: divided by n, not n - 1
        return (x - mean) / torch.sqrt(var + self.eps)

    @property
    def row_dims(self) -> tuple[int, ...]:
        """The dimensions that are one row, as reductions take them: (-1,) where it is a vector."""
        return tuple(range(-len(self.normalized_shape), 0))

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, bias={self.bias is not None}"

    def _check_input(self, x: Tensor) -> None:
        if not x.is_floating_point():
            raise NormError(f"this norm is of floating-point numbers, and the input is {x.dtype}")
        if x.shape[-len(self.normalized_shape) :] != self.normalized_shape:
            raise NormError(f"this norm is over {self.normalized_shape}, but the input is {tuple(x.shape)}")


def row_shape(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    """The shape of a row.

    Raises:
        NormError: it has no dimension, or one that is no size.
    """
    sizes = normalized_shape if isinstance(normalized_shape, Iterable) else [normalized_shape]
    try:
        shape = tuple(map(operator.index, sizes))
    except TypeError:
        shape = ()
    if not shape or not 1 <= min(shape) <= max(shape) < 2**31:
        raise NormError(f"normalized_shape must be one or more sizes above 0 and below 2^31, not {normalized_shape!r}")
    return shape
