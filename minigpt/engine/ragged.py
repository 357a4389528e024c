"""Several texts in one sequence: attention treats each by itself, with a mask and a cache of its own.

N tokens in all, C embedding.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.model.cache import KVCache


class Ragged(NamedTuple):
    """Where attention expects a cache: those of several texts, whose tokens stand one after the other."""

    shapes: Sequence[tuple[int, ...]]  # (batch, seq) of each
    masks: Sequence[Tensor | None]
    caches: Sequence[KVCache]

    def mix_each(
        self, mix: Callable[..., Tensor], qkv: Float[Tensor, "1 tokens qkv"]
    ) -> Float[Tensor, "1 tokens embd"]:
        """What ``mix`` makes of each text's part, with its own mask and cache."""
        mixed = map(mix, self.apart(qkv), self.masks, self.caches)
        return torch.cat([y.flatten(0, 1) for y in mixed])[None]  # each (B, T, C)

    def apart(self, tokens: Float[Tensor, "1 tokens width"]) -> list[Tensor]:
        """Each text's own part, (batch, seq, width)."""
        parts = tokens[0].split([batch * seq for batch, seq in self.shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, self.shapes, strict=True)]
