"""Ids that stand for no text, where a vocabulary was filled up to a multiple: they are never generated."""

import torch
from jaxtyping import Float
from torch import Tensor


def without_unused_ids(
    logits: Float[Tensor, "batch vocab"], used_vocab_size: int | None
) -> Float[Tensor, "batch vocab"]:
    """The logits with -inf for every id from ``used_vocab_size`` on; None leaves them as they are."""
    if used_vocab_size is None:
        return logits
    unused = torch.arange(logits.shape[-1], device=logits.device) >= used_vocab_size  # (V,)
    return logits.masked_fill(unused, -torch.inf)
