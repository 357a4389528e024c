"""Keys and values of the tokens already read, so that a new token costs one token's work.

L layers, B batch, H heads, S tokens so far, T new tokens, D width of a head.
"""

from typing import Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from minigpt.config import GPT2Config

Queries = Float[Tensor, "batch heads seq head"]
Keys = Float[Tensor, "batch heads total head"]
NewKeys = Float[Tensor, "2 batch heads new head"]  # the keys, then the values


class LayerCache(Protocol):
    """The methods of a cache that attention calls."""

    def update(self, layer: int, new: NewKeys) -> tuple[Tensor, ...]:
        """Add a layer's new keys and values (2, B, H, T, D); return all of its keys and values, each (B, H, S, D)."""
        ...


class KVCache:
    """Room for ``max_length`` tokens in every layer. The caller owns it, and ``GPT2.forward`` appends to it.

    ``GPT2.new_cache`` makes one that fits the model.

    Args:
        config: the model's.
        batch_size, max_length: B, and the largest S.
        dtype, device: of the keys and values.

    Attributes:
        store: (L, 2, B, H, max_length, D), the keys and then the values of every layer.
        length: the number of tokens in the cache. Set it lower to forget the newer ones.
        padding_mask: (B, length), True for real tokens, or None if no padding has been read.
    """

    def __init__(
        self, config: GPT2Config, batch_size: int, max_length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (config.n_layer, 2, batch_size, config.n_head, max_length, config.head_size)
        self.store = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0
        self.padding_mask: Bool[Tensor, "batch length"] | None = None

    def update(self, layer: int, new: NewKeys) -> tuple[Tensor, ...]:
        """Write a layer's new keys and values behind the old; return all of them as views, each (B, H, S, D)."""
        room = self.store.select(0, layer)  # (2, B, H, max_length, D)
        count = new.shape[3]
        room.narrow(3, self.length, count).copy_(new)
        kept = room.narrow(3, 0, self.length + count)  # (2, B, H, S, D)
        return kept.to(new.dtype).unbind()

    def advance(self, seq: int, padding_mask: Bool[Tensor, "batch total"] | None) -> None:
        """Count ``seq`` new tokens as read, once every layer has them."""
        self.length += seq
        self.padding_mask = padding_mask
