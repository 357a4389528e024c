"""Decoding one token a row as a program that ``torch.compile`` makes, over a cache of fixed shape.

B rows, H heads, S tokens that the cache has room for, D width of a head, C embedding.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from minigpt.engine.parts import PLAINER, FastGPT2
from minigpt.errors import ConfigError
from minigpt.model.cache import KVCache, LayerCache
from minigpt.model.checks import check_gpt2, kind_of
from minigpt.model.gpt2 import GPT2
from minigpt.norms.add import is_watched

Layers = tuple[Tensor, ...]  # each (2, B, H, S, D); of one tensor for all layers, a compiler copies the whole for each


class CompiledGPT2(FastGPT2):
    """A fast model that reads one new token a row by a compiled program. It reads prompts as ``FastGPT2`` does."""

    def run(
        self, x: Float[Tensor, "batch seq embd"], mask: Tensor | None, cache: LayerCache | None
    ) -> Float[Tensor, "batch seq embd"]:
        """Return the stream (B, T, C) after every block and the last norm."""
        if x.shape[1] != 1 or not isinstance(cache, KVCache) or is_watched(self):
            return super().run(x, mask, cache)
        past, room = cache.length, cache.max_length
        if mask is None:
            visible = (torch.arange(room, device=x.device) <= past)[None]  # (1, S)
        else:
            visible = F.pad(mask[:, 0, 0], (0, room - past - 1))  # (B, S)
        hidden = torch.zeros(visible.shape, dtype=x.dtype, device=x.device).masked_fill_(~visible, -torch.inf)
        layers = cache.store.unbind()
        for layer in layers:  # a CUDA graph writes to the cache itself, not to a copy
            torch._dynamo.mark_static_address(layer, guard=False)
        return program()(self, x, hidden, layers, torch.tensor([past], device=x.device)).clone()

    def new_cache(self, batch_size: int, max_length: int) -> KVCache:
        cache = super().new_cache(batch_size, max_length)
        cache.store.zero_()  # a step reads what is masked too, which must be finite
        return cache


PLAINER[CompiledGPT2] = GPT2


class FixedCache(NamedTuple):
    """All the room of a cache, and the new token's column as data, so that no shape depends on it."""

    layers: Layers
    column: Tensor  # (1,)

    def update(self, layer: int, new: Float[Tensor, "2 batch heads 1 head"]) -> tuple[Tensor, ...]:
        """Write a layer's new keys and values into the column; return its room, each (B, H, S, D)."""
        room = self.layers[layer]
        return room.index_copy_(3, self.column, new.to(room.dtype)).to(new.dtype).unbind()


def read(model: GPT2, x: Tensor, mask: Tensor, layers: Layers, column: Tensor) -> Float[Tensor, "batch 1 embd"]:
    """Return the stream (B, 1, C) of one new token a row after the network; ``mask`` (B or 1, S) is added to scores."""
    return GPT2.run(model, x, mask[:, None, None], FixedCache(layers, column))


@functools.cache
def program() -> Callable[..., Tensor]:
    """Return ``read`` compiled. On CUDA, the mode "reduce-overhead" records it as a CUDA graph."""
    return torch.compile(read, mode="reduce-overhead")


def compile_steps(model: GPT2) -> GPT2:
    """Compile the reading of one new token a row, from the next step on; return ``model``. ``plain`` undoes it.

    The first step takes the compiler's time: half a minute for GPT-2's 12 layers. Another batch or length compiles once
    more. Make caches after this call.

    Raises:
        ConfigError: if the model is not a GPT2 in fast arithmetic with "sdpa" attention.
    """
    check_gpt2(model)
    if type(model) not in (FastGPT2, CompiledGPT2):
        raise ConfigError(f"model must be in fast arithmetic to be compiled, got {kind_of(model)}; use accelerate")
    if model.attention != "sdpa":
        raise ConfigError(f'must be "sdpa" to be compiled, got {model.attention!r}', argument="attention")
    model.__class__ = CompiledGPT2
    return model
