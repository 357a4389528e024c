"""Reading of texts: token ids in, logits out, with the keys and values of every text in a row of its own.

B texts that are read together, T tokens of the longest piece, S columns, L layers, H heads, D width of a head, C width
of the residual stream, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from minigpt.engine.step import StepKernel, step_of
from minigpt.model import GPT2

SHORT_PIECE = 31  # tokens; shorter pieces are read together, whatever their lengths

Pieces = Mapping[int, Sequence[int]]


class Reader:
    """Reads further tokens of several texts with one model.

    A text lies in a row of the cache, from column 0 on. Where the kernel serves the model, the bits of a text's logits
    depend on the text alone: not on the other texts, nor on the pieces in which it is read. Elsewhere PyTorch reads
    pieces of similar length together, and the last bits depend on the others.

    Args:
        rows: the most texts.
        columns: the most tokens of a text.

    Attributes:
        lengths: the number of tokens read of each row. Set it lower to forget the last ones.
        store: (L, 2, rows, H, columns, D), the keys and values.

    Raises:
        GenerationError: if two blocks would write to the same layer.
    """

    def __init__(self, model: GPT2, rows: int, columns: int) -> None:
        self.model, self.kernel = model, step_of(model)
        self.lengths = [0] * rows
        self.store: Tensor = model.new_cache(rows, columns).store
        if self.kernel is None:
            self.store = self.store.to(model.wte.weight.dtype).zero_()  # what is masked must be finite

    @property
    def columns(self) -> int:
        return self.store.shape[4]

    @torch.inference_mode()
    def read(self, pieces: Pieces, last: int | Mapping[int, int] = 1) -> Float[Tensor, "outputs vocab"]:
        """Read further tokens of some rows; return logits after the last tokens of each piece.

        Args:
            pieces: row -> its next tokens.
            last: how many tokens of each piece have their logits returned, for all rows or by row.

        Returns:
            (outputs, V) in the order of ``pieces``: in float32 by the kernel, elsewhere in the model's dtype.
        """
        pieces = {row: ids for row, ids in pieces.items() if ids}
        if not pieces:
            return torch.empty(0, self.model.config.vocab_size)
        outputs = last
        if isinstance(outputs, int):
            outputs = {row: min(outputs, len(ids)) for row, ids in pieces.items()}
        if self.kernel is not None and self.kernel.is_outdated():
            self._renew()
        if self.kernel is None:
            logits = self._by_torch(pieces, outputs)
        else:
            logits = self._by_kernel(self.kernel, pieces, outputs)
        for row, ids in pieces.items():
            self.lengths[row] += len(ids)
        return logits

    def copy(self, row: int, to: int, length: int | None = None) -> None:
        """Copy the first ``length`` tokens of a row, by default all, into another."""
        if length is None:
            length = self.lengths[row]
        self.store[:, :, to, :, :length] = self.store[:, :, row, :, :length]
        self.lengths[to] = length

    def clear(self, row: int) -> None:
        """Forget a row."""
        if self.kernel is None:  # PyTorch multiplies what is masked by 0, and NaN times 0 is NaN
            self.store[:, :, row] = 0  # all of it: a step that failed may have written beyond the length
        self.lengths[row] = 0

    def _renew(self) -> None:
        """Read with the model as it is now: its modules or Parameters were replaced."""
        self.kernel = step_of(self.model)
        if self.kernel is None:
            for row, length in enumerate(self.lengths):
                self.store[:, :, row, :, length:] = 0

    def _by_kernel(
        self, kernel: StepKernel, pieces: Pieces, outputs: Mapping[int, int]
    ) -> Float[Tensor, "outputs vocab"]:
        tokens: list[int] = []
        rows: list[int] = []
        columns: list[int] = []
        output_rows: list[int] = []
        for row, ids in pieces.items():
            tokens += ids
            rows += [row] * len(ids)
            columns += range(self.lengths[row], self.lengths[row] + len(ids))
            output_rows += range(len(tokens) - outputs[row], len(tokens))
        return kernel(tokens, rows, columns, self.store, output_rows)

    def _by_torch(self, pieces: Pieces, outputs: Mapping[int, int]) -> Float[Tensor, "outputs vocab"]:
        hidden: dict[int, Tensor] = {}
        for rows in _similar_rows(pieces):
            texts = [pieces[row] for row in rows]
            states_of_rows = self._hidden_states(rows, texts)
            for row, states in zip(rows, states_of_rows, strict=True):
                length = len(pieces[row])
                hidden[row] = states[length - outputs[row] : length]  # (outputs, C)
        states = torch.cat([hidden[row] for row in pieces])  # (outputs, C)
        if not len(states):
            return states.new_empty(0, self.model.config.vocab_size)
        return self.model.head(states[None])[0]

    def _hidden_states(self, rows: list[int], texts: list[Sequence[int]]) -> Float[Tensor, "batch seq embd"]:
        """Return the last norm's output (B, T, C) after every token; shorter pieces are padded on the right."""
        device = self.model.wte.weight.device
        starts: list[int] = []
        counts: list[int] = []
        tensors: list[Tensor] = []
        total = 0
        for row, text in zip(rows, texts, strict=True):
            starts.append(self.lengths[row])
            counts.append(len(text))
            tensors.append(torch.tensor(text))
            total = max(total, self.lengths[row] + len(text))
        ids = pad_sequence(tensors, batch_first=True).to(device)  # (B, T)
        offsets = torch.arange(ids.shape[1], device=device)
        columns = torch.tensor(starts, device=device)[:, None] + offsets  # (B, T)
        mask = None
        starts_differ = len({*starts}) > 1
        if starts_differ or (starts[0] > 0 and ids.shape[1] > 1):
            is_seen = torch.arange(total, device=device) <= columns[..., None]  # (B, T, S)
            mask = is_seen[:, None]
        positions = columns.clamp(max=self.model.config.n_positions - 1)  # of padding
        x = self.model.embed(ids, positions)
        return self.model.run(x, positions, mask, RowsOfCache(self.store, rows, starts, counts, total))


class RowsOfCache(NamedTuple):
    """Some rows of a ``Reader``'s cache, as attention writes and reads them."""

    store: Tensor
    rows: list[int]
    starts: list[int]  # the column of each piece's first token
    counts: list[int]  # tokens of each piece, without padding
    total: int  # columns that the last query sees

    def update(self, layer: int, new: Float[Tensor, "2 batch heads new head"]) -> tuple[Tensor, ...]:
        """Write a layer's new keys and values; return all that a query may see, each (B, H, S, D)."""
        room, rows = self.store[layer], self.rows  # (2, rows, H, columns, D)
        for place, (row, start, count) in enumerate(zip(rows, self.starts, self.counts, strict=True)):
            room[:, row, :, start : start + count] = new[:, place, :, :count]
        seen = room[:, rows[0] : rows[-1] + 1]  # a view, and no copy
        if len(rows) != seen.shape[1]:
            seen = room[:, rows]
        return seen[..., : self.total, :].to(new.dtype).unbind()


def _similar_rows(pieces: Pieces) -> list[list[int]]:
    """Return the rows in groups, whose pieces are of similar length."""
    groups: dict[int, list[int]] = {}
    for row in sorted(pieces):
        length = max(len(pieces[row]), SHORT_PIECE)
        groups.setdefault(length.bit_length(), []).append(row)  # at most half of what is read together is padding
    return [groups[size] for size in sorted(groups)]
