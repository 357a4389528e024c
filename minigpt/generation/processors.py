"""Logits -> logits, one small function each, in transformers' order and to its very values."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minigpt.generation.settings import GenerationSettings, parse_settings

Logits = Float[Tensor, "batch vocab"]


def warp(logits: Logits, input_ids: Int[Tensor, "batch seq"] | None = None, **settings: Any) -> Logits:
    """The logits to draw from, after every processor that the settings name; excluded tokens are -inf.

    Args:
        logits: (B, V) of the next token.
        input_ids: (B, T) the tokens so far.
        settings: as ``generate`` takes them.

    Raises:
        GenerationError: a setting is unknown or out of range.
    """
    return warp_by(logits, parse_settings(**{"max_new_tokens": 1, **settings}))


def warp_by(logits: Logits, settings: GenerationSettings) -> Logits:
    """``warp`` for settings that are already checked."""
    if settings.temperature not in (0, 1):
        logits = logits / settings.temperature
    if settings.top_k is not None:
        logits = keep_top_k(logits, settings.top_k)
    if settings.top_p is not None and settings.top_p < 1:
        logits = keep_top_p(logits, settings.top_p)
    return logits


def keep_top_k(logits: Logits, k: int) -> Logits:
    """The k highest logits and those equal to the lowest of them (Fan et al. 2018, arXiv 1805.04833)."""
    lowest_kept = logits.topk(min(k, logits.shape[-1])).values[..., -1:]  # (B, 1)
    return logits.masked_fill(logits < lowest_kept, -torch.inf)


def keep_top_p(logits: Logits, p: float) -> Logits:
    """The fewest likeliest tokens whose probabilities reach p (nucleus; Holtzman et al. 2019, arXiv 1904.09751)."""
    ascending, order = logits.sort()  # both (B, V)
    in_the_tail = ascending.softmax(-1).cumsum(-1) <= 1 - p
    in_the_tail[..., -1] = False
    return logits.masked_fill(in_the_tail.scatter(1, order, in_the_tail), -torch.inf)
