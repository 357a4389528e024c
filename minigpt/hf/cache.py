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

    def update(
        self, layer: int, key: Float[Tensor, "batch heads new head"], value: Float[Tensor, "batch heads new head"]
    ) -> tuple[Float[Tensor, "batch heads total head"], Float[Tensor, "batch heads total head"]]:
        """Add a layer's new keys and values; return all that the cache has."""
        found: Any = self.cache.update(key, value, layer)
        return found
