"""Weights in strips of columns, for one token at a time on processors with tile instructions (AMX).

oneDNN has the tiles, made for many rows, multiply a single one too, and then reads weights at half of memory's speed.
But ``x W`` is the sum of the rows of ``W``, each times a value of ``x``: a bag of embeddings. The library's fetches
rows ahead, adds up in float32 and rounds once; and every bag has its thread, so a strip is a bag.

K strips of D columns, R rows of ``x``.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from minigpt.engine.packed import LetGo, PackedConv1D, PackedLinear, keep, pack, require_packable
from minigpt.engine.product import known_length
from minigpt.model.gpt2 import GPT2

WIDTH = 128  # D: so many sums fit the registers, and the narrowest product of GPT-2 still has six strips to share out


class StripedLinear(PackedLinear):
    """``y = x W^T + b`` like a ``PackedLinear``: one row of ``x`` by bags, several by as many products as strips.

    Attributes:
        packed: the strips, (K * in, D), the last filled up with zeros; below them the bias, (K, D), where there is one.
        indices: which rows of ``packed`` each strip's sum has, (K * (in + 1)) or without a bias (K * in).
        starts: where in ``indices`` each strip begins, (K).
    """

    dtypes = (torch.float32, torch.bfloat16)  # on any processor

    def forward(self, x: Float[Tensor, "batch seq inp"]) -> Float[Tensor, "batch seq out"]:
        if torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                return self.forward(x)
        rows = x.reshape(-1, x.shape[-1]).to(self.dtype)  # (R, in)
        y = self._of_one(rows) if known_length(rows) == 1 else self._of_several(rows)  # (R, K * D)
        return y[:, : self.shape[0]].to(x.dtype).reshape(*x.shape[:-1], -1)

    def rows(self) -> Float[Tensor, "out inp"]:
        """The weight, in the usual order."""
        return self._strips().transpose(1, 2).flatten(0, 1)[: self.shape[0]]  # (K, in, D) -> (K * D, in) -> (out, in)

    def pack(self, rows: Float[Tensor, "out inp"]) -> None:
        require_packable(rows := rows.detach(), self.dtypes)
        self.dtype = rows.dtype
        (out, inp), count = rows.shape, -(-len(rows) // WIDTH)  # K
        indices = _summed(count, inp, self.bias is not None)
        self.indices, self.starts = indices.flatten(), indices.new_tensor(range(count)) * indices.shape[1]
        self.one = rows.new_ones(1, 1)
        self.hold(rows.new_zeros(indices.numel(), WIDTH))
        strips, whole = self._strips(), out // WIDTH
        strips[:whole] = rows[: whole * WIDTH].unflatten(0, (whole, WIDTH)).transpose(1, 2)
        strips[whole:, :, : out % WIDTH] = rows[whole * WIDTH :].t()
        if self.bias is not None:
            shift = self.packed[count * inp :].flatten()[:out]  # a view, so that who changes the bias changes the sum
            self.bias.data = shift.copy_(self.bias.data)

    def extra_repr(self) -> str:
        return "{1}, {0}, in strips".format(*self.shape)

    def _of_one(self, x: Float[Tensor, "1 inp"]) -> Float[Tensor, "1 columns"]:
        weights = x if self.bias is None else torch.cat((x, self.one), dim=1)  # (1, in + 1)
        weights = weights.expand(len(self.starts), -1).flatten()
        sums = F.embedding_bag(self.indices, self.packed, self.starts, mode="sum", per_sample_weights=weights)
        return sums.view(1, -1)  # (K, D) -> (1, K * D)

    def _of_several(self, x: Float[Tensor, "rows inp"]) -> Float[Tensor, "rows columns"]:
        strips = self._strips()
        below = self.packed[len(strips) * self.shape[1] :, None]  # (K, 1, D), or nothing
        x = x.expand(len(strips), -1, -1)  # (K, R, in)
        y = torch.baddbmm(below, x, strips) if len(below) else torch.bmm(x, strips)  # (K, R, D)
        return y.transpose(0, 1).flatten(1)  # (R, K * D)

    def __getstate__(self) -> dict[str, Any]:
        """With a bias of its own: as a view it would bring the whole table."""
        state = super().__getstate__()
        if self.bias is not None:
            bias = nn.Parameter(self.bias.detach().clone(), self.bias.requires_grad)
            state["_parameters"] = {**state["_parameters"], "bias": bias}
        return state

    def _strips(self) -> Float[Tensor, "strips inp width"]:
        return self.packed[: len(self.starts) * self.shape[1]].view(len(self.starts), self.shape[1], -1)


class StripedConv1D(StripedLinear, PackedConv1D):
    """A ``Conv1D`` whose weight is in strips, and saved as ever: (in, out)."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "bias"] = destination[prefix + "bias"].clone()


def _summed(count: int, inp: int, is_biased: bool) -> Int[Tensor, "count rows"]:
    """Which rows of the table each strip adds up: its own, and one of those below all strips, the bias."""
    own = torch.arange(count * inp, dtype=torch.int32, device="cpu").view(count, inp)
    below = torch.arange(count * inp, count * (inp + 1), dtype=torch.int32, device="cpu")[:, None]
    return torch.cat((own, below), dim=1) if is_biased else own


def stripe(model: GPT2, let_go: LetGo = keep) -> GPT2:
    """``pack`` for one token at a time, in strips. Several at a time, as of a prompt, take up to twice as long."""
    return pack(model, 1, let_go, StripedLinear, StripedConv1D)
