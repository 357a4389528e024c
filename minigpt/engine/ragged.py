"""The texts in a cache that the kernel reads and writes: each in a slot of its own, from column 0 on.

L layers, H heads, S columns, D width of a head, V vocabulary.
"""

from collections.abc import Mapping, Sequence

from jaxtyping import Float
from torch import Tensor

from minigpt.engine.kernel import StepKernel
from minigpt.model.cache import KVCache


class Ragged:
    """Rows of different lengths. No row moves when others join or leave.

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

    def add(self, read: Float[Tensor, "layers 2 heads columns head"] | None = None, length: int = 0) -> int:
        """Add a row, with copies of the first ``length`` keys and values of ``read``; return its number."""
        slot = next(slot for slot in range(self.store.shape[2]) if slot not in self.slots)
        if read is not None:
            self.store[:, :, slot, :, :length] = read[..., :length, :]
        self.slots.append(slot)
        self.lengths.append(length)
        return len(self.slots) - 1

    def copy(self, row: int) -> int:
        """Add a row with the tokens of another; return its number."""
        return self.add(self.store[:, :, self.slots[row]], self.lengths[row])

    def join(self, other: KVCache, rows: list[int], starts: list[int]) -> None:
        """Add copies of these rows of another cache; ``starts`` has the first column of each in that cache."""
        for row in rows:
            self.add(other.store[:, :, row, :, starts[row] :], other.length - starts[row])

    def leave(self, row: int) -> None:
        """Remove a row; the last row takes its number."""
        for values in (self.slots, self.lengths):
            values[row] = values[-1]
            del values[-1]

    def forget(self, tokens: int) -> None:
        """Forget the last tokens of the first row."""
        self.lengths[0] -= tokens

    def read(self, texts: Mapping[int, Sequence[int]], last: int | None = None) -> Float[Tensor, "wanted vocab"]:
        """Read further tokens of some rows, by their numbers.

        Return the logits after every token, or after the ``last`` tokens of each row.
        """
        tokens: list[int] = []
        slots: list[int] = []
        columns: list[int] = []
        wanted: list[int] = []
        for row, ids in texts.items():
            wanted += range(len(tokens) + len(ids) - (len(ids) if last is None else last), len(tokens) + len(ids))
            tokens += ids
            slots += [self.slots[row]] * len(ids)
            columns += range(self.lengths[row], self.lengths[row] + len(ids))
            self.lengths[row] += len(ids)
        return self.kernel(tokens, slots, columns, self.store, wanted)
