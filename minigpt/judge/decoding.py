"""Logits as they are while a text is written: a token at a time, from a cache, several texts at once.

A norm may be right on whole texts and wrong there: at one token a row, in the addition it then fuses, in a batch.
"""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.engine import GPT2
from minigpt.generation.any_length import of_any_length
from minigpt.generation.padding import left_padded
from minigpt.judge.greedy import Continued, batches
from minigpt.judge.measures import Distance

# B texts, T tokens, V vocabulary

Read = Callable[[Tensor, Tensor], Tensor]  # more ids (B, T) and the mask of all so far -> logits (B, V) after them
Begin = Callable[[int, int], Read]  # how many texts, and the most tokens of each


@of_any_length()
def decoding_distance(
    begin: Begin, texts: list[Continued], truths: list[Float[Tensor, "_seq vocab"]], device: torch.device
) -> Distance:
    """How far the logits before each token that transformers wrote are from the truth, where they are read as written.

    Args:
        begin: makes the reader of a batch: ``ours`` of a model, or ``Reference.reading``.
        truths: for each text the true logits (T, V) at every token.
    """
    found = Distance()
    for new, batch in batches([len(text.reference) for text in texts]):
        for step, logits in enumerate(_decoded(begin, [texts[i] for i in batch], new, device)):
            found.add(logits, torch.stack([truths[i][texts[i].before_new][step] for i in batch]))
    return found


def ours(model: GPT2) -> Begin:
    """A model of ours as a reader."""

    def begin(batch: int, longest: int) -> Read:
        cache = model.new_cache(batch, longest)
        return lambda ids, mask: model.head(model.hidden_states(ids, mask, cache=cache)[:, -1:])[:, 0]

    return begin


def _decoded(
    begin: Begin, texts: list[Continued], new: int, device: torch.device
) -> Iterator[Float[Tensor, "batch vocab"]]:
    """Logits (B, V) before each of ``new`` tokens: after the prompts, padded on the left, and then token by token."""
    ids, mask = left_padded([text.prompt for text in texts], device)  # both (B, T)
    written = torch.tensor([text.reference for text in texts], device=device)  # (B, new)
    read = begin(len(texts), ids.shape[1] + new - 1)
    yield read(ids, mask)
    for step in range(new - 1):
        mask = torch.cat([mask, mask.new_ones(len(texts), 1)], dim=1)
        yield read(written[:, step : step + 1], mask)
