"""LayerNorm with eps in the wrong place, as many tutorials write it."""

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.norms.registry import register
from minigpt.norms.textbook import LayerNorm


@register("std_eps", exact=False)
class StdEps(LayerNorm):
    """Divides by the deviation plus eps, (x - mean) / (std + eps), instead of sqrt(var + eps).

    The deviation is biased, divided by n, as LayerNorm's is. On ordinary rows the two differ in the fifth digit. On a
    constant row this one divides by eps, LayerNorm by its root.
    """

    def standardize(self, x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
        """Return the row at mean 0 and a deviation just below 1."""
        # each (..., 1); the gradient of this deviation at 0 is 0
        std, mean = torch.std_mean(x, dim=self.row_dims, correction=0, keepdim=True)
        return (x - mean) / (std + self.eps)
