"""The position-wise half of a block: widen, bend, narrow."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from minigpt.config import GPT2Config
from minigpt.model.conv1d import Conv1D


class MLP(nn.Module):
    """``c_proj(activation(c_fc(x)))``, with ``inner_size`` units between."""

    def __init__(self, config: GPT2Config, arithmetic: str) -> None:
        super().__init__()
        self.c_fc = Conv1D(config.n_embd, config.inner_size, arithmetic)
        self.c_proj = Conv1D(config.inner_size, config.n_embd, arithmetic)
        self.dropout = nn.Dropout(config.resid_pdrop)
        self.activation = activation(config.activation_function, arithmetic)

    def forward(self, x: Float[Tensor, "batch seq embd"]) -> Float[Tensor, "batch seq embd"]:
        x = self.c_proj(self.activation(self.c_fc(x)))  # (B, T, C) -> (B, T, inner) -> (B, T, C)
        return self.dropout(x) if self.training else x


def activation(name: str, arithmetic: str) -> Callable[[Tensor], Tensor]:
    """The function a config names. ``gelu_new`` is one fused call in fast arithmetic, its formula in reference."""
    if name == "gelu_new" and arithmetic == "fast":
        name = "gelu_pytorch_tanh"
    return {
        "gelu_new": gelu_new,
        "gelu_pytorch_tanh": gelu_tanh,
        "gelu": F.gelu,
        "relu": F.relu,
        "silu": F.silu,
        "swish": F.silu,
        "tanh": torch.tanh,
    }[name]


def gelu_new(x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
    """GELU by tanh (Hendrycks & Gimpel 2016, arXiv 1606.08415, section 2), operation by operation as the reference."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu_tanh(x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
    return F.gelu(x, approximate="tanh")


def unchanged(x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
    """For a place where nothing is left to be done."""
    return x
