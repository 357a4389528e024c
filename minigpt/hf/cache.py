"""transformers' cache as our blocks see one."""

from typing import Any

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

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add a layer's new keys and values (B, H, T, D); return all that the cache has (B, H, S, D)."""
        found: Any = self.cache.update(key, value, layer)
        return found
