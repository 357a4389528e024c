"""Pad texts of different lengths into one batch."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor


def left_padded(
    texts: Sequence[Sequence[int]], device: torch.device | str | None = None
) -> tuple[Int[Tensor, "batch seq"], Int[Tensor, "batch seq"]]:
    """Return token ids (B, T), padded on the left, and their attention mask (B, T): 0 for padding."""
    longest = max(map(len, texts))
    starts = [longest - len(text) for text in texts]
    ids = torch.tensor([[0] * start + list(text) for start, text in zip(starts, texts, strict=True)], device=device)
    mask = torch.arange(longest, device=device) >= torch.tensor(starts, device=device)[:, None]
    return ids, mask.long()
