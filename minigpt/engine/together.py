"""Texts of several shapes in one forward: the weights are read once for all, and each text attends to itself alone.

N tokens in all, C embedding.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minigpt.engine.ragged import Ragged
from minigpt.model.attention import CausalSelfAttention
from minigpt.model.cache import KVCache
from minigpt.model.gpt2 import GPT2, Block
from minigpt.model.mlp import MLP
from minigpt.model.plain import is_plain, is_watched


class Text(NamedTuple):
    """Rows of one shape that are read into a cache of their own; as ``GPT2.forward`` takes them."""

    input_ids: Int[Tensor, "batch seq"]
    attention_mask: Tensor | None
    cache: KVCache


def hidden_states_of_each(model: GPT2, texts: list[Text]) -> list[Float[Tensor, "batch seq embd"]]:
    """``GPT2.hidden_states`` of each text; arguments and errors are the same."""
    embedded = [model.embedded(ids, mask, None, cache) for ids, mask, cache in texts]
    shapes = [x.shape[:2] for x, _ in embedded]
    masks = [model.mask(padding, text.cache.length, x.shape[1], x)
             for text, (x, padding) in zip(texts, embedded, strict=True)]  # fmt: skip
    ragged = Ragged(shapes, masks, [text.cache for text in texts])
    together = torch.cat([x.flatten(0, 1) for x, _ in embedded])[None]  # (1, N, C)
    x = model.read(together, None, ragged)
    for text, (_, padding) in zip(texts, embedded, strict=True):
        text.cache.advance(text.input_ids.shape[1], padding)
    return ragged.apart(x)


def reads_together(model: GPT2) -> bool:
    """Whether ``hidden_states_of_each`` is for this model: whatever sees the tokens is our own, and nobody watches."""
    blocks: Any = model.h
    return (
        model.step is None
        and type(model).read is GPT2.read
        and is_plain(model.hidden_states, GPT2.hidden_states)
        and all(is_plain(block.forward, Block.forward) for block in blocks)
        and all(is_plain(block.attn.forward, CausalSelfAttention.forward) for block in blocks)
        and all(is_plain(block.mlp.forward, MLP.forward) for block in blocks)
        and not is_watched(model)
    )
