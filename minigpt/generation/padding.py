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
    ids = [[0] * (longest - len(text)) + list(text) for text in texts]
    mask = [[0] * (longest - len(text)) + [1] * len(text) for text in texts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
