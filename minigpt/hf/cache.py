"""transformers' cache as our blocks see one."""

from typing import Any

from jaxtyping import Float
from torch import Tensor
from transformers import Cache

from minigpt.model import KVCache


class BorrowedCache(KVCache):
    """For one forward: keys and values go to transformers' cache, which reorders, crops, offloads as ``generate`` asks.

    It counts its tokens by itself, so that there is nothing to advance. Its owner passes the mask of the padding.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.length = int(cache.get_seq_length())
        self.padding_mask = None

    def update(self, layer: int, new: Float[Tensor, "2 batch heads new head"]) -> tuple[Tensor, ...]:
        """Add a layer's new keys and values; return all that the cache has, each (B, H, S, D)."""
        key, value = new
        found: Any = self.cache.update(key, value, layer)
        return found
