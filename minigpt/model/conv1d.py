"""GPT-2's affine layer, as its checkpoints store it."""

import torch
from jaxtyping import Float
from torch import Tensor, nn


class Conv1D(nn.Module):
    """``y = x W + b`` with ``weight`` of shape (in, out): a linear layer whose weight is not transposed.

    GPT-2 was written with 1-wide convolutions, whose kernels are (in, out). Keeping that layout lets a checkpoint be
    used where it lies, and asks the matrix library for the reference's own product, so that not a bit differs.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: Float[Tensor, "batch seq inp"]) -> Float[Tensor, "batch seq out"]:
        rows = x.reshape(-1, x.shape[-1])  # (B * T, in); a copy only where a norm left its output in another layout
        return torch.addmm(self.bias, rows, self.weight).view(*x.shape[:-1], -1)  # (B, T, out)

    def extra_repr(self) -> str:
        return "{}, {}".format(*self.weight.shape)
