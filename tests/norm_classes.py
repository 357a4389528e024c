"""Norms of somebody's own that several test files swap in: other names, other formulas, and faults."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minigpt import LayerNorm

SCALED = """
from minigpt import LayerNorm

class Scaled(LayerNorm):
    def standardize(self, x):
        return super().standardize(x) * 1.01
"""  # the source of a norm in somebody's file


class EmbDim(nn.Module):
    """A LayerNorm as in tutorials: ``emb_dim`` alone, an eps of its own, Parameters ``scale`` and ``shift``."""

    def __init__(self, emb_dim: int) -> None:
        super().__init__()
        self.eps = 1e-5
        self.scale, self.shift = nn.Parameter(torch.ones(emb_dim)), nn.Parameter(torch.zeros(emb_dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.scale, self.shift, self.eps)


class Doubling(LayerNorm):
    """A norm that is unmistakably another."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Louder(LayerNorm):
    """A LayerNorm that is wrong: 3 % too large."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.03


class NoGradient(nn.LayerNorm):
    """A LayerNorm that passes no gradient."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.no_grad():
            return super().forward(x)
