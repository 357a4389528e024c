"""Group the texts to read: texts of similar lengths are read together, to save padding.

B texts, T tokens of the longest.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor


def groups(lengths: list[int], overhead: int) -> list[slice]:
    """Return the cheapest groups of texts, given their lengths in descending order.

    Each group is padded to its longest text. It costs its tokens, padding included, and ``overhead`` more for reading
    all weights.
    """
    count = len(lengths)
    best = [(0, count)] * (count + 1)  # from each text on: the least cost, and where its first group ends
    for start in reversed(range(count)):
        ends = range(start + 1, count + 1)
        best[start] = min((lengths[start] * (end - start) + overhead + best[end][0], end) for end in ends)
    found, start = [], 0
    while start < count:
        found.append(slice(start, best[start][1]))
        start = best[start][1]
    return found


def left_padded(
    texts: Sequence[Sequence[int]], device: torch.device | str | None = None
) -> tuple[Int[Tensor, "batch seq"], Int[Tensor, "batch seq"]]:
    """Return token ids (B, T), padded on the left, and their attention mask (B, T): 0 for padding."""
    longest = max(map(len, texts))
    starts = [longest - len(text) for text in texts]
    ids = torch.tensor([[0] * start + list(text) for start, text in zip(starts, texts, strict=True)], device=device)
    mask = torch.arange(longest, device=device) >= torch.tensor(starts, device=device)[:, None]
    return ids, mask.long()
