"""transformers' cache as our blocks see one."""

from typing import Any

from jaxtyping import Float
from torch import Tensor
from transformers import Cache


class BorrowedCache:
    """A ``LayerCache``: keys and values go to transformers' own, which counts, reorders, crops and offloads them.

    Args:
        total: the tokens in it with the new ones, S; of a cache that hands out all its room, the others are left out.
            None leaves that to the caller's mask, which is over the whole room.
    """

    def __init__(self, cache: Cache, total: int | None) -> None:
        self.cache, self.total = cache, total

    def update(self, layer: int, new: Float[Tensor, "2 batch heads new head"]) -> tuple[Tensor, ...]:
        """Add a layer's new keys and values; return all that the cache has, each (B, H, S, D)."""
        key, value = new
        found: Any = self.cache.update(key, value, layer)
        return tuple(tensor[:, :, : self.total] for tensor in found)
