"""Prompt lookup: what the text has said before is a guess at what it says next, and one forward judges it.

(Saxena 2023, prompt lookup decoding; verified as in speculative decoding, Leviathan et al. 2023, arXiv 2211.17192.)
Each token is still chosen from the model's own logits, with the row's own random number, so what is written is what
would have been written without. A guess that is wrong costs its part of the forward, and one that is right saves one.
"""

from collections.abc import Sequence

import torch

from minigpt.generation.any_length import of_any_length
from minigpt.generation.batch import Batch, next_logits, next_tokens
from minigpt.generation.row import Row

RUNS = (3, 2)  # lengths of the runs looked up, the more telling first


class Drafter:
    """Remembers where each run of tokens was last followed by something."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._known = 0

    def draft(self, ids: list[int], most: int) -> list[int]:
        """Up to ``most`` tokens that followed the text's last run when it was last seen; none if it is new.

        The copy may run on into itself, as it does where a text goes round in circles.
        """
        for end in range(self._known, len(ids)):
            for size in RUNS:
                if end >= size:
                    self._after[tuple(ids[end - size : end])] = end
        self._known = len(ids)
        starts = (self._after.get(tuple(ids[-size:])) for size in RUNS if len(ids) >= size)
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
            if not rows[0].new_ids:  # and not one whose window has moved on
                self.drafter = Drafter()
        super().join(rows)

    @torch.inference_mode()
    def choose(self) -> list[Row]:
        """Add tokens up to the first that the draft did not foresee."""
        (row,) = self.rows
        read = self.slots.length - len(self.drafted)
        for right, logits in enumerate(self.logits.split(1)):  # each (1, V)
            row.push(*next_tokens(logits, self.rows))
            if row.end or right == len(self.drafted) or row.ids[-1] != self.drafted[right]:
                self.slots.length = read + right  # the rest of the draft is forgotten
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
        (row,) = self.rows  # and so there is no place for a new one
        room = min(row.left, self.context - self.slots.length, self.slots.max_length - self.slots.length) - 1
        self.drafted = self.drafter.draft(row.ids, min(self.settings.draft_tokens, room))
        ids = torch.tensor([[row.ids[-1], *self.drafted]], device=self.device)  # (1, 1 + drafted)
        hidden = self.model.hidden_states(ids, cache=self.slots)  # (1, 1 + drafted, C)
        self.logits = next_logits(self.model, self.model.head(hidden)[0])  # (1 + drafted, V)
        return None
