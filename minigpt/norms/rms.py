"""RMSNorm: LayerNorm without the mean."""

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.norms.registry import register
from minigpt.norms.textbook import LayerNorm


@register("rms", exact=False)
class RMSNorm(LayerNorm):
    """Divides by the root mean square and subtracts no mean (Zhang & Sennrich 2019, arXiv 1910.07467, equation 4).

    ``y = x / sqrt(mean(x^2) + eps) * weight + bias``. The paper has no shift; a pretrained GPT-2 has one, and keeps it.
    """

    def standardize(self, x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
        """Return the row at mean square 1."""
        return x / torch.sqrt(x.square().mean(dim=self.row_dims, keepdim=True) + self.eps)
