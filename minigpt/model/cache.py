"""Keys and values of the tokens already read, so that a new token costs one token's work.

L layers, B batch, H heads, S tokens so far, T new tokens, D width of a head.
"""

from typing import Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class LayerCache(Protocol):
    """What attention needs of a cache."""

    def update(self, layer: int, new: Float[Tensor, "2 batch heads new head"]) -> tuple[Tensor, ...]:
        """Add a layer's new keys and values (2, B, H, T, D); return all of its keys and values, each (B, H, S, D)."""
        ...


class KVCache:
    """Room for ``max_length`` tokens in every layer. The caller owns it, and ``GPT2.forward`` appends to it.

    ``GPT2.new_cache`` makes one that fits the model.

    Args:
        n_layer, batch_size, n_head, max_length, head_size: L, B, H, the largest S, and D.
        dtype, device: of the keys and values.

    Attributes:
        store: (L, 2, B, H, max_length, D), the keys and then the values of every layer.
        length: the number of tokens in the cache. Set it lower to forget the newer ones.
        padding_mask: (B, length), True for real tokens, or None if no padding has been read.
    """

    def __init__(
        self, n_layer: int, batch_size: int, n_head: int, max_length: int, head_size: int,
        *, dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        shape = (n_layer, 2, batch_size, n_head, max_length, head_size)
        self.store = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0
        self.padding_mask: Bool[Tensor, "batch length"] | None = None

    @property
    def batch_size(self) -> int:
        return self.store.shape[2]

    @property
    def max_length(self) -> int:
        return self.store.shape[4]

    def update(self, layer: int, new: Float[Tensor, "2 batch heads new head"]) -> tuple[Tensor, ...]:
        """Write a layer's new keys and values behind the old; return all of them as views, each (B, H, S, D)."""
        room, count = self.store.select(0, layer), new.shape[3]  # (2, B, H, max_length, D)
        room.narrow(3, self.length, count).copy_(new)
        return room.narrow(3, 0, self.length + count).to(new.dtype).unbind()  # int8 models keep them in bfloat16

    def advance(self, seq: int, padding_mask: Bool[Tensor, "batch total"] | None) -> None:
        """Count ``seq`` new tokens as read, once every layer has them."""
        self.length += seq
        self.padding_mask = padding_mask
