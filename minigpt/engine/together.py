"""Several texts in one forward: the weights are read once for all, and each text attends to itself alone.

N tokens in all, C embedding.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minigpt.engine.hooks import is_unpatched, is_watched
from minigpt.engine.parts import FastAttention, FastMLP, Texts
from minigpt.engine.root import GPT2
from minigpt.model import gpt2
from minigpt.model.cache import KVCache
from minigpt.model.masking import causal_mask


class Text(NamedTuple):
    """Rows of one shape with a cache of their own, as ``GPT2.forward`` takes them."""

    input_ids: Int[Tensor, "batch seq"]
    attention_mask: Tensor | None
    cache: KVCache


def read_each(model: GPT2, texts: list[Text]) -> list[Float[Tensor, "batch seq embd"]]:
    """Return ``GPT2.hidden_states`` of each text, from one forward."""
    embedded = [model.embed(ids, mask, None, cache) for ids, mask, cache in texts]
    shapes = [x.shape[:2] for x, _ in embedded]
    masks = [
        causal_mask(real, text.cache.length, x.shape[1], x.device)
        for text, (x, real) in zip(texts, embedded, strict=True)
    ]
    joined = Texts(shapes, masks, [text.cache for text in texts])
    x = model.run(torch.cat([x.flatten(0, 1) for x, _ in embedded])[None], None, joined)  # (1, N, C)
    for text, (_, real) in zip(texts, embedded, strict=True):
        text.cache.advance(text.input_ids.shape[1], real)
    return joined.split(x)


def reads_together(model: GPT2) -> bool:
    """Return True if ``read_each`` suits this model: its blocks are our fast ones, and no hooks watch them."""
    blocks: Any = model.h
    return (
        isinstance(model, GPT2)
        and model.step is None
        and type(model).run is GPT2.run
        and is_unpatched(model.hidden_states, gpt2.GPT2.hidden_states)
        and all(
            is_unpatched(block.forward, gpt2.Block.forward)
            and is_unpatched(block.attn.forward, FastAttention.forward)
            and is_unpatched(block.mlp.forward, FastMLP.forward)
            for block in blocks
        )
        and not is_watched(model)
    )
