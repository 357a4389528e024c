"""The half of a block that works on each token alone, and GPT-2's affine layer."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from minigpt.config import GPT2Config

Stream = Float[Tensor, "batch seq embd"]  # what the blocks read and add to


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
        rows = x.reshape(-1, x.shape[-1])  # (B * T, in)
        y = torch.addmm(self.bias, rows, self.weight)  # (B * T, out)
        return y.view(*x.shape[:-1], -1)

    def extra_repr(self) -> str:
        return "{}, {}".format(*self.weight.shape)


class MLP(nn.Module):
    """``c_proj(act(c_fc(x)))``, with ``config.inner_size`` hidden units."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = Conv1D(config.n_embd, config.inner_size)
        self.c_proj = Conv1D(config.inner_size, config.n_embd)
        self.act = activation(config.activation_function)
        self.dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, x: Stream) -> Stream:
        x = self.act(self.c_fc(x))  # (B, T, C) -> (B, T, inner)
        return self.dropout(self.c_proj(x))  # (B, T, C)


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """Return the function that a config calls ``name``."""
    return {
        "gelu_new": gelu_new, "gelu_pytorch_tanh": gelu_tanh, "gelu": F.gelu, "relu": F.relu,
        "silu": F.silu, "swish": F.silu, "tanh": torch.tanh,
    }[name]  # fmt: skip


def gelu_new(x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
    """GELU by tanh (Hendrycks & Gimpel 2016, arXiv 1606.08415, section 2), in the reference's operations."""
    half = 0.5 * x  # the first, as in the reference: gradients are added in the order of the operations
    cubic = x + 0.044715 * torch.pow(x, 3.0)
    inner = math.sqrt(2.0 / math.pi) * cubic
    return half * (1.0 + torch.tanh(inner))


def gelu_tanh(x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
    """The same function as PyTorch computes it, in one call."""
    return F.gelu(x, approximate="tanh")
