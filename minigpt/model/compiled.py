"""A step of decoding as one program made by ``torch.compile``, over a cache of fixed shape. Opt-in.

B batch, S tokens that the cache has room for, C embedding.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from minigpt.errors import ConfigError
from minigpt.model.cache import KVCache
from minigpt.model.gpt2 import GPT2


def compile_steps(model: GPT2, **options: Any) -> GPT2:
    """From now on, compile the reading of one new token a row; return ``model``.

    It attends over all the room of a cache, with what is not yet written masked, so that no shape changes from one
    token to the next: a run compiles once, and once more where another batch or length makes the shapes variable. The
    prompt is read as before. The first step takes the compiler's time, a minute or so for GPT-2's 12 layers.

    Args:
        options: as ``torch.compile`` takes them.

    Raises:
        ConfigError: the attention is not "sdpa".
    """
    if model.attention != "sdpa":
        raise ConfigError(f'compiled steps need attention="sdpa", and the model has {model.attention!r}')
    model.step = CompiledStep(model, options)
    return model


Layers = tuple[Tensor, ...]  # each (B, H, S, D): of all layers in one tensor, the compiler would copy the whole a layer


class _FixedCache:
    """A cache's storage under the compiler: one new column, at a place that is data and no shape."""

    def __init__(self, keys: Layers, values: Layers, place: Tensor) -> None:
        self.keys, self.values, self.place = keys, values, place

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.keys[layer], self.values[layer]
        keys.index_copy_(2, self.place, key)
        values.index_copy_(2, self.place, value)
        return keys, values  # (B, H, S, D)


class CompiledStep:
    """Called by the model where it would run its blocks on one new token a row."""

    def __init__(self, model: GPT2, options: dict[str, Any]) -> None:
        def run(x: Tensor, mask: Tensor, keys: Layers, values: Layers, place: Tensor) -> Tensor:
            cache: Any = _FixedCache(keys, values, place)
            return model.read(x, mask, cache)

        self.run = torch.compile(run, **options)

    def __call__(
        self, x: Float[Tensor, "batch 1 embd"], padding: Bool[Tensor, "batch total"] | None, cache: KVCache
    ) -> Float[Tensor, "batch 1 embd"]:
        place, room = cache.length, cache.max_length
        if padding is None:
            mask = (torch.arange(room, device=x.device) <= place)[None]  # (1, S)
        else:
            mask = F.pad(padding, (0, room - place - 1))  # (B, S)
        column = torch.tensor([place], device=x.device)
        return self.run(x, mask[:, None, None], cache.keys.unbind(), cache.values.unbind(), column)
