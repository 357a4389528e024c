"""A cache whose rows come and go while the others write on.

L layers, B rows in use, H heads, S columns in use, D width of a head.
"""

import torch
from torch import Tensor

from minigpt.model.cache import KVCache


class Slots(KVCache):
    """Rows of different lengths that all end at the same column: a new token is the same column for everybody.

    A row starts where its own text does; what stands before it is masked, and finite. So a row may join with its text
    already read, and leave again, without any other being touched. ``room`` is where they live: its batch size is the
    most rows there can be at a time, its ``max_length`` the most columns.

    Attributes:
        room: (L, 2, most rows, H, max_length, D) keys and values of all rows that there can be.
        starts: the first column of each row.
    """

    def __init__(self, room: KVCache) -> None:
        self.room: Tensor = room.store
        self.length = 0
        self.starts: list[int] = []
        self._settle()

    def read_into(self, starts: list[int]) -> None:
        """Make ready for a forward that reads the whole texts of these first rows, padded on the left, straight in."""
        self.length, self.starts = 0, list(starts)
        self._settle()

    def repeat(self, rows: list[int]) -> None:
        """Have these rows instead, each as often as it is named."""
        for layer in self.room:  # (2, most rows, H, max_length, D)
            layer[:, : len(rows), :, : self.length] = layer[:, rows, :, : self.length]
        self.starts = [self.starts[row] for row in rows]
        self._settle()

    def join(self, other: KVCache, rows: list[int], starts: list[int]) -> None:
        """Add copies of these rows of another cache, each of which starts at a column of that one."""
        self._move(max(0, other.length - self.length))
        count, pad = len(self.starts), self.length - other.length
        mine = self.room[:, :, count : count + len(rows)]
        mine[:, :, :, :, :pad] = 0  # not NaN: times a weight of 0, it would be NaN
        mine[:, :, :, :, pad : self.length] = other.store[:, :, rows, :, : other.length]
        self.starts += [pad + starts[row] for row in rows]
        self._settle()

    def leave(self, row: int) -> None:
        """Remove a row; the last one takes its number."""
        last = len(self.starts) - 1
        if row != last:
            self.room[:, :, row, :, : self.length] = self.room[:, :, last, :, : self.length]
        self.starts[row] = self.starts[last]
        del self.starts[last]
        self._settle()

    def trim(self, waste: int) -> None:
        """Give up the columns before the first row's start, if these are at least ``waste`` or no column is free."""
        spare = min(self.starts, default=0)
        if spare and (spare >= waste or self.length == self.max_length):
            self._move(-spare)
            self._settle()

    def grow(self) -> None:
        """Count one new token of each row as read, once every layer has them."""
        self.length += 1
        self.padding_mask = self._mask() if any(self.starts) else None

    def _move(self, columns: int) -> None:
        """Everybody to the right, or where ``columns`` is negative to the left."""
        if not columns:
            return
        kept = slice(max(0, -columns), self.length)
        moved = slice(kept.start + columns, self.length + columns)
        count = len(self.starts)
        for layer in self.room:  # one at a time: what is copied twice is a layer, and not the whole
            layer[:, :count, :, moved] = layer[:, :count, :, kept].clone()
            layer[:, :count, :, : moved.start] = 0
        self.length += columns
        self.starts = [start + columns for start in self.starts]

    def _settle(self) -> None:
        count = len(self.starts)
        self.store = self.room[:, :, :count]
        self.padding_mask = self._mask() if any(self.starts) else None

    def _mask(self) -> Tensor:
        starts = torch.tensor(self.starts, device=self.room.device)
        return torch.arange(self.length, device=self.room.device) >= starts[:, None]  # (B, S)
