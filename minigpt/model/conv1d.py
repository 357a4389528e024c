"""GPT-2's affine layer, as its checkpoints store it."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from minigpt.engine.product import product


class Conv1D(nn.Module):
    """``y = x W + b`` with ``weight`` of shape (in, out): a linear layer whose weight is not transposed.

    GPT-2 was written with 1-wide convolutions, whose kernels are (in, out). Keeping that shape lets a checkpoint be
    used where it lies, and in reference arithmetic asks the matrix library for the reference's own product, so that not
    a bit differs.
    """

    def __init__(self, in_features: int, out_features: int, arithmetic: str = "fast") -> None:
        super().__init__()
        self.arithmetic = arithmetic
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: Float[Tensor, "batch seq inp"]) -> Float[Tensor, "batch seq out"]:
        if self.arithmetic == "fast":
            return product(x, self.weight, self.bias)
        y = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)  # (B * T, out)
        return y.view(*x.shape[:-1], -1)

    def extra_repr(self) -> str:
        return "{}, {}".format(*self.weight.shape)
