"""Prompt lookup: copy earlier tokens of the text as a draft, and verify the draft in one forward.

The method is prompt lookup decoding (Saxena 2023), verified as in speculative decoding (Leviathan et al. 2023, arXiv
2211.17192). Each token is still chosen from the model's own logits, with the row's own random number, so the text is
the same as without a draft. A correct token of the draft saves a forward; a wrong one wastes its part of one.
"""

from collections.abc import Sequence

import torch

from minigpt.generation.any_length import of_any_length
from minigpt.generation.batch import Batch, next_logits, next_tokens
from minigpt.generation.row import Row

NGRAMS = (3, 2)  # lengths of the n-grams to look up, the more specific first


class Drafter:
    """Remembers for each n-gram of the text where its last occurrence ends."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._known = 0

    def draft(self, ids: list[int], most: int) -> list[int]:
        """Return up to ``most`` tokens that followed the last n-gram when it occurred before; [] if it is new.

        The copy may continue into itself, so a text that repeats itself is drafted as a repetition.
        """
        for end in range(self._known, len(ids)):
            for size in NGRAMS:
                if end >= size:
                    self._after[tuple(ids[end - size : end])] = end
        self._known = len(ids)
        starts = (self._after.get(tuple(ids[-size:])) for size in NGRAMS if len(ids) >= size)
        start = next((start for start in starts if start is not None), None)
        if start is None:
            return []
        text = list(ids)
        for place in range(start, start + most):
            text.append(text[place])
        return text[len(ids) :]


class LookupBatch(Batch):
    """A batch of one row that reads its last token and a draft at once."""

    drafter: Drafter
    drafted: list[int]

    def join(self, rows: list[Row]) -> None:
        if rows:
            self.drafted = []
            if not rows[0].new_ids:  # a new text, not one whose window slides
                self.drafter = Drafter()
        super().join(rows)

    @torch.inference_mode()
    def choose(self) -> list[Row]:
        """Add the draft's correct tokens and the first one that differs."""
        (row,) = self.rows
        read = self.slots.length - len(self.drafted)
        for right, logits in enumerate(self.logits.split(1)):  # each (1, V)
            row.push(*next_tokens(logits, self.rows))
            if row.end or right == len(self.drafted) or row.ids[-1] != self.drafted[right]:
                self.slots.length = read + right  # drop the rest of the draft
                break
        if row.end:
            self.drafted = []
            self._leave([0])
        return [row]

    @torch.inference_mode()
    @of_any_length()
    def read(self, new: Sequence[Row] = ()) -> None:
        if not self.rows or self.slots.length >= self.context:
            return super().read(new)
        (row,) = self.rows  # the only place is taken, so ``new`` is empty
        room = min(row.left, self.context - self.slots.length, self.slots.max_length - self.slots.length) - 1
        self.drafted = self.drafter.draft(row.ids, min(self.settings.draft_tokens, room))
        ids = torch.tensor([[row.ids[-1], *self.drafted]], device=self.device)  # (1, 1 + drafted)
        hidden = self.model.hidden_states(ids, cache=self.slots)  # (1, 1 + drafted, C)
        self.logits = next_logits(self.model, self.model.head(hidden)[0])  # (1 + drafted, V)
        return None
