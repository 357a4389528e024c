"""Texts of several shapes in one forward: the weights are read once for all, and each text attends to itself alone.

N tokens in all, C embedding.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minigpt.model.cache import KVCache

if TYPE_CHECKING:
    from minigpt.model.gpt2 import GPT2


class Text(NamedTuple):
    """Rows of one shape that are read into a cache of their own; as ``GPT2.forward`` takes them."""

    input_ids: Int[Tensor, "batch seq"]
    attention_mask: Tensor | None
    cache: KVCache


class Company(NamedTuple):
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


def hidden_states_of_each(model: "GPT2", texts: list[Text]) -> list[Float[Tensor, "batch seq embd"]]:
    """``GPT2.hidden_states`` of each text; arguments and errors are the same."""
    embedded = [model.embedded(ids, mask, None, cache) for ids, mask, cache in texts]
    shapes = [x.shape[:2] for x, _ in embedded]
    masks = [model.mask(padding, text.cache.length, x.shape[1], x)
             for text, (x, padding) in zip(texts, embedded, strict=True)]  # fmt: skip
    company = Company(shapes, masks, [text.cache for text in texts])
    together = torch.cat([x.flatten(0, 1) for x, _ in embedded])[None]  # (1, N, C)
    x = model.read(together, None, company)
    for text, (_, padding) in zip(texts, embedded, strict=True):
        text.cache.advance(text.input_ids.shape[1], padding)
    return company.apart(x)
