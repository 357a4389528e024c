"""Caches whose rows join and leave while the others go on.

L layers, B rows in use, H heads, S columns in use, D width of a head, V vocabulary.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.engine.kernel import StepKernel
from minigpt.model.cache import KVCache

WASTE = 32  # unused columns from which on it pays to move all rows to the left


class Ragged:
    """Rows of different lengths, each from column 0 of a slot of its own. No row moves when others join or leave.

    Args:
        room: the memory: its batch size limits the rows, its ``max_length`` the columns.
        kernel: what reads tokens into it.

    Attributes:
        slots: the slot of each row.
        lengths: the tokens that are read of each row.
    """

    def __init__(self, room: KVCache, kernel: StepKernel) -> None:
        self.store, self.kernel, self.max_length = room.store, kernel, room.max_length
        self.slots: list[int] = []
        self.lengths: list[int] = []

    @property
    def free(self) -> int:
        """Columns behind the longest row."""
        return self.max_length - max(self.lengths)

    def add(self, length: int = 0) -> int:
        """Add a row; return its number."""
        self.slots.append(next(slot for slot in range(self.store.shape[2]) if slot not in self.slots))
        self.lengths.append(length)
        return len(self.slots) - 1

    def copy(self, row: int) -> None:
        """Add a row with the tokens of another."""
        self._fill(self.store[:, :, self.slots[row]], self.lengths[row])

    def join(self, other: KVCache, rows: list[int], starts: list[int]) -> None:
        """Add copies of these rows of another cache; ``starts`` has the first column of each in that cache."""
        for row in rows:
            self._fill(other.store[:, :, row, :, starts[row] :], other.length - starts[row])

    def _fill(self, read: Tensor, length: int) -> None:
        slot = self.slots[self.add(length)]
        self.store[:, :, slot, :, :length] = read[..., :length, :]

    def leave(self, row: int) -> None:
        """Remove a row; the last row takes its number."""
        for values in (self.slots, self.lengths):
            values[row] = values[-1]
            del values[-1]

    def forget(self, tokens: int) -> None:
        """Forget the last tokens of the only row."""
        self.lengths[0] -= tokens

    def read(self, texts: Mapping[int, Sequence[int]], *, every: bool = True) -> Float[Tensor, "read vocab"]:
        """Read further tokens of some rows; return the logits after every token, or after each row's last."""
        tokens: list[int] = []
        slots: list[int] = []
        columns: list[int] = []
        last: list[int] = []
        for row, ids in texts.items():
            tokens += ids
            slots += [self.slots[row]] * len(ids)
            columns += range(self.lengths[row], self.lengths[row] + len(ids))
            last.append(len(tokens) - 1)
            self.lengths[row] += len(ids)
        return self.kernel(tokens, slots, columns, self.store, None if every else last)


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

    @property
    def free(self) -> int:
        """Columns behind those in use."""
        return self.max_length - self.length

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
