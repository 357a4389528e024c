"""Group the texts to read: equal texts are read once, and texts of similar lengths together, to save padding.

B texts, T tokens of the longest.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from minigpt.generation.row import Row


class Reading(NamedTuple):
    """Rows whose texts are read together, each text once, padded on the left.

    Attributes:
        ids, mask: (B, T) of the texts.
        starts: the first column of each text.
        of_row: which text each row has.
    """

    rows: list[Row]
    ids: Int[Tensor, "batch seq"]
    mask: Int[Tensor, "batch seq"] | None
    starts: list[int]
    of_row: list[int]


def readings(windows: dict[Row, list[int]], overhead: int, device: torch.device) -> list[Reading]:
    """Return the rows in groups to read together; rows of one prompt with the same text share it."""
    said = {row: (row.prompt, tuple(ids)) for row, ids in windows.items()}
    texts = sorted(dict.fromkeys(said.values()), key=lambda text: -len(text[1]))
    found = []
    for few in groups([len(ids) for _, ids in texts], overhead):
        place_of = {text: place for place, text in enumerate(texts[few])}
        ids, mask = left_padded([ids for _, ids in place_of], device)  # both (B, T)
        starts = [ids.shape[1] - len(text) for _, text in place_of]
        rows = [row for row in windows if said[row] in place_of]
        of_row = [place_of[said[row]] for row in rows]
        found.append(Reading(rows, ids, mask if any(starts) else None, starts, of_row))
    return found


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
