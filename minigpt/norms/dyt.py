"""Dynamic Tanh, hard tanh and dynamic erf: an element-wise function in place of statistics."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from minigpt.norms.registry import register
from minigpt.norms.textbook import LayerNorm


@register("dyt", exact=False)
class DyT(LayerNorm):
    """Squeezes each element by itself, tanh(alpha * x) (Zhu et al. 2025, arXiv 2503.10622, equation 4).

    ``y = tanh(alpha * x) * weight + bias``. ``alpha`` is one learned number for each norm. ``eps`` has no effect.

    Args:
        alpha: its initial value; the paper's 0.5 is for models trained with it from the start.
    """

    def __init__(
        self, normalized_shape: int | Sequence[int], eps: float = 1e-5, *, bias: bool = True, alpha: float = 0.5
    ) -> None:
        super().__init__(normalized_shape, eps=eps, bias=bias)
        self.alpha = nn.Parameter(torch.tensor(float(alpha)))

    def standardize(self, x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
        """Return each element within (-1, 1)."""
        return torch.tanh(self.alpha * x)


@register("hardtanh", exact=False)
class HardTanh(DyT):
    """Cuts each element off, ``y = clip(alpha * x, -1, 1) * weight + bias`` (arXiv 2604.23434)."""

    def standardize(self, x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
        """Return each element within [-1, 1]."""
        return (self.alpha * x).clamp(-1, 1)


@register("derf", exact=False)
class Derf(DyT):
    """Squeezes each element by itself, erf(alpha * x + s) (Chen et al. 2025, arXiv 2512.10938, equation 10).

    ``y = erf(alpha * x + s) * weight + bias``. ``alpha`` and ``s`` are one learned number each for each norm, and
    ``s`` is 0 initially. ``eps`` has no effect.
    """

    def __init__(
        self, normalized_shape: int | Sequence[int], eps: float = 1e-5, *, bias: bool = True, alpha: float = 0.5
    ) -> None:
        super().__init__(normalized_shape, eps=eps, bias=bias, alpha=alpha)
        self.s = nn.Parameter(torch.tensor(0.0))

    def standardize(self, x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
        """Return each element within (-1, 1)."""
        return torch.erf(self.alpha * x + self.s)
