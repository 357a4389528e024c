"""Keys and values of the tokens already read, so that a new token costs one token's work."""

from numbers import Integral
from typing import NamedTuple, Protocol, SupportsIndex

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from minigpt.config import GPT2Config
from minigpt.errors import GenerationError

# L layers, B batch, H heads, S tokens so far, T new tokens, D width of a head


class LayerCache(Protocol):
    """What attention asks of a cache."""

    def update(self, layer: int, new: Float[Tensor, "2 batch heads new head"]) -> tuple[Tensor, ...]:
        """Add a layer's new keys and values (2, B, H, T, D); return all that it has, each (B, H, S, D)."""
        ...


Layers = tuple[Tensor, ...]  # each (2, B, H, S, D); of all layers in one tensor, a compiler copies the whole for each


class FixedCache(NamedTuple):
    """A cache's storage with one new column. What is masked is read too, so it must be finite."""

    layers: Layers
    column: Tensor  # (1,)

    def update(self, layer: int, new: Tensor) -> tuple[Tensor, ...]:
        """Write a layer's new keys and values (2, B, H, 1, D) into the column; return its room, each (B, H, S, D)."""
        return self.layers[layer].index_copy_(3, self.column, new).unbind()


class KVCache:
    """Room for ``max_length`` tokens in every layer. The caller owns it; ``GPT2.forward`` appends to it.

    ``GPT2.new_cache`` makes one that fits the model.

    Args:
        n_layer, batch_size, n_head, max_length, head_size: L, B, H, the most S, and D.
        dtype, device: of the keys and values.

    Raises:
        GenerationError: there are no rows, or there is room for no token.

    Attributes:
        store: (L, 2, B, H, max_length, D) of every layer the keys, and then the values.
        length: tokens in it. Setting it lower forgets the newer ones.
        padding_mask: (batch, length) bool, True for real tokens, or None where no padding has been read.
    """

    def __init__(
        self, n_layer: int, batch_size: int, n_head: int, max_length: int, head_size: int,
        *, dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        for what, number in (("row", batch_size), ("token", max_length)):
            if not isinstance(number, Integral | torch.SymInt) or number < 1:
                raise GenerationError(f"a cache is for one {what} or more, not {number!r}")
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
        """Write a layer's new keys and values behind the old; return all its keys, and all its values, as views."""
        room, count = self.store.select(0, layer), new.shape[3]  # (2, B, H, max_length, D)
        room.narrow(3, self.length, count).copy_(new)
        return room.narrow(3, 0, self.length + count).unbind()  # each (B, H, S, D)

    def advance(self, seq: int, padding_mask: Bool[Tensor, "batch total"] | None) -> None:
        """Count the new tokens as read, once every layer has them."""
        self.length += seq
        self.padding_mask = padding_mask

    def require_shape(self, config: GPT2Config) -> None:
        """Refuse to be another model's.

        Raises:
            GenerationError: the model has other layers or heads.
        """
        layers, _, _, *heads = self.store.select(4, 0).shape  # (L, 2, B, H, D)
        wanted = [config.n_layer, config.n_head, config.head_size]
        if (mine := [layers, *heads]) != wanted:
            raise GenerationError(
                f"the cache is for {mine[0]} layers of {mine[1]} heads {mine[2]} wide, and the model has "
                f"{wanted[0]}, {wanted[1]} and {wanted[2]}; make it by the model's own new_cache"
            )

    def require_room(self, batch_size: int, seq: int) -> None:
        """Refuse new tokens that do not fit, before anything is written.

        Raises:
            GenerationError: another batch size, more tokens than there is room for, or a length that is none.
        """
        if not isinstance(self.length, SupportsIndex) or self.length < 0:
            raise GenerationError(f"a cache's length is the number of its tokens, not {self.length!r}")
        if batch_size != self.batch_size:
            raise GenerationError(
                f"the cache is for a batch of {self.batch_size}, but the input is a batch of {batch_size}"
            )
        if self.length + seq > self.max_length:
            raise GenerationError(
                f"the cache has room for {self.max_length} tokens: {self.length} are in it and {seq} more do not fit"
            )
