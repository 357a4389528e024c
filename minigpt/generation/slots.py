"""A cache for PyTorch whose rows join and leave while the others go on. The kernel's is ``engine.ragged``.

L layers, B rows in use, H heads, S columns in use, D width of a head.
"""

import torch
from torch import Tensor

from minigpt.model.cache import KVCache

WASTE = 32  # unused columns from which on it pays to move all rows to the left


class Slots(KVCache):
    """Rows of different lengths that all end at the same column, so that a new token has the same column in each.

    The columns before the start of a row's text are masked, and finite. So a row can join with its text already read,
    and leave again, without changing the others.

    Args:
        room: the memory: its batch size limits the rows, its ``max_length`` the columns.

    Attributes:
        room: (L, 2, places, H, max_length, D) keys and values of all places.
        starts: the first column of each row.
    """

    def __init__(self, room: KVCache) -> None:
        self.room: Tensor = room.store
        self.length = 0
        self.starts: list[int] = []
        self._settle()

    @property
    def lengths(self) -> list[int]:
        """The tokens that are read of each row."""
        return [self.length - start for start in self.starts]

    def join(self, other: KVCache, rows: list[int], starts: list[int]) -> None:
        """Add copies of these rows of another cache; ``starts`` has the first column of each in that cache."""
        self.trim(WASTE)
        self.length = self.length if self.starts else 0
        self._move(max(0, other.length - self.length))
        count, pad = len(self.starts), self.length - other.length
        for layer, read in zip(self.room, other.store, strict=True):  # so that the temporary copy is small
            mine = layer[:, count : count + len(rows)]
            mine[:, :, :, :pad] = 0  # memory may hold NaN, and NaN times a weight of 0 is NaN
            mine[:, :, :, pad : self.length] = read[:, rows, :, : other.length]
        self.starts += [pad + starts[row] for row in rows]
        self._settle()

    def leave(self, row: int) -> None:
        """Remove a row; the last row takes its place."""
        last = len(self.starts) - 1
        if row != last:
            self.room[:, :, row, :, : self.length] = self.room[:, :, last, :, : self.length]
        self.starts[row] = self.starts[last]
        del self.starts[last]
        self._settle()

    def forget(self, tokens: int) -> None:
        """Forget the last tokens of all rows."""
        self.resize(self.length - tokens)

    def trim(self, waste: int) -> None:
        """Remove the columns before the first row's start, if they are at least ``waste`` or no column is free."""
        spare = min(self.starts, default=0)
        if spare and (spare >= waste or self.length == self.max_length):
            self._move(-spare)
            self._settle()

    def resize(self, length: int) -> None:
        """Count so many columns, after every layer has written its keys and values there; or forget the last ones."""
        self.length, self.padding_mask = length, None
        if any(self.starts):
            starts = torch.tensor(self.starts, device=self.room.device)
            self.padding_mask = torch.arange(length, device=self.room.device) >= starts[:, None]  # (B, S)

    def _move(self, columns: int) -> None:
        """Move all rows to the right, or to the left if ``columns`` is negative."""
        if not columns:
            return
        kept = slice(max(0, -columns), self.length)
        moved = slice(kept.start + columns, self.length + columns)
        count = len(self.starts)
        for layer in self.room:  # layer by layer, so that the temporary copy is small
            layer[:, :count, :, moved] = layer[:, :count, :, kept].clone()
            layer[:, :count, :, : moved.start] = 0
        self.length += columns
        self.starts = [start + columns for start in self.starts]

    def _settle(self) -> None:
        self.store = self.room[:, :, : len(self.starts)]
        self.resize(self.length)
