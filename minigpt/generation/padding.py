"""Texts of different lengths as one batch."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor


def left_padded(
    texts: Sequence[Sequence[int]], device: torch.device | str | None = None
) -> tuple[Int[Tensor, "batch seq"], Int[Tensor, "batch seq"]]:
    """Token ids (B, T) of texts that end together, and their attention mask: 0 where the shorter ones are filled up."""
    longest = max(map(len, texts))
    starts = [longest - len(text) for text in texts]
    ids = torch.tensor([[0] * start + list(text) for start, text in zip(starts, texts, strict=True)], device=device)
    mask = torch.arange(longest, device=device) >= torch.tensor(starts, device=device)[:, None]
    return ids, mask.long()
