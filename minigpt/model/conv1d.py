"""GPT-2's affine layer, with the weight layout of its checkpoints."""

import torch
from jaxtyping import Float
from torch import Tensor, nn


class Conv1D(nn.Module):
    """``y = x W + b``: a linear layer whose ``weight`` has shape (in, out).

    GPT-2 was written with convolutions of width 1, and their kernels are (in, out). With that shape a checkpoint needs
    no transposition, and the matrix library computes the reference's own product, bit for bit.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: Float[Tensor, "batch seq inp"]) -> Float[Tensor, "batch seq out"]:
        """(B, T, in) -> (B, T, out)."""
        y = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)  # (B * T, out)
        return y.view(*x.shape[:-1], -1)

    def extra_repr(self) -> str:
        return "{}, {}".format(*self.weight.shape)
