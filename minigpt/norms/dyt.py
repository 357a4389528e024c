"""Dynamic Tanh: no statistics at all, only a squeeze."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from minigpt.norms.registry import register
from minigpt.norms.textbook import LayerNorm


@register("dyt", exact=False)
class DyT(LayerNorm):
    """Squeezes each element, tanh(alpha * x), looking at no other (Zhu et al. 2025, arXiv 2503.10622, equation 4).

    ``y = tanh(alpha * x) * weight + bias``. ``alpha`` is one learned number for each norm, a Parameter beside weight
    and bias that a GPT-2's checkpoint has no place for. There is nothing that ``eps`` could be added to.

    Args:
        alpha: where it starts; the paper's own 0.5 is for models trained with it from the start.
    """

    def __init__(
        self, normalized_shape: int | Sequence[int], eps: float = 1e-5, bias: bool = True, alpha: float = 0.5
    ) -> None:
        super().__init__(normalized_shape, eps, bias)
        self.initial_alpha = float(alpha)
        self.alpha = nn.Parameter(torch.tensor(self.initial_alpha))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Weight, bias and alpha as they were at first."""
        super().reset_parameters()
        self.alpha.fill_(self.initial_alpha)

    def standardize(self, x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
        """Each element within (-1, 1)."""
        return torch.tanh(self.alpha * x)
