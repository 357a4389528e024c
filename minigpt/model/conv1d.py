"""GPT-2's affine layer, as its checkpoints store it."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from minigpt.model.product import product


class Conv1D(nn.Module):
    """``y = x W + b`` with ``weight`` of shape (in, out): a linear layer whose weight is not transposed.

    GPT-2 was written with 1-wide convolutions, whose kernels are (in, out). Keeping that shape lets a checkpoint be
    used where it lies, and asks the matrix library for the reference's own product, so that not a bit differs.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: Float[Tensor, "batch seq inp"]) -> Float[Tensor, "batch seq out"]:
        rows = self.weight.t()  # (out, in)
        return product(x, rows, self.bias) if rows.is_contiguous() else F.linear(x, rows, self.bias)

    def extra_repr(self) -> str:
        return "{}, {}".format(*self.weight.shape)
