"""GPT-2's affine layer, as its checkpoints store it."""

import torch
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
        return affine(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        return "{}, {}".format(*self.weight.shape)


def affine(
    x: Float[Tensor, "batch seq inp"], weight: Float[Tensor, "inp out"], bias: Float[Tensor, " out"]
) -> Float[Tensor, "batch seq out"]:
    """``x W + b``, by the call that suits how ``W`` lies: as in the checkpoint, or by rows (see ``layout``)."""
    if not weight.is_contiguous() and (rows := weight.t()).is_contiguous():
        return product(x, rows, bias)
    y = torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight)  # (B * T, out)
    return y.view(*x.shape[:-1], -1)
