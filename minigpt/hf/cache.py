"""transformers' cache as our blocks see one."""

from typing import Any

from jaxtyping import Float
from torch import Tensor
from transformers import Cache


class BorrowedCache:
    """A ``LayerCache``: keys and values go to transformers' own, which counts, reorders, crops and offloads them."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    def update(self, layer: int, new: Float[Tensor, "2 batch heads new head"]) -> tuple[Tensor, ...]:
        """Add a layer's new keys and values; return all that the cache has, each (B, H, S, D)."""
        key, value = new
        found: Any = self.cache.update(key, value, layer)
        return found
