"""Drafts: guess a text's next tokens cheaply, and let the model verify all of them in one step.

A draft is copied from the text itself (prompt lookup decoding, Saxena 2023), or written by the model's own int8 form.
It is verified as in speculative decoding (Leviathan et al. 2023, arXiv 2211.17192). Every token is still chosen from
the model's own logits, with the row's own random number, so the text is the same as without a draft. A correct token
of the draft saves a step; a wrong one wastes its part of one.
"""

from collections import deque
from contextlib import suppress
from statistics import median_low

import torch

from minigpt.engine.int8 import drafter_of, is_rounded, why_not_drafted
from minigpt.engine.ragged import Ragged
from minigpt.errors import ConfigError, GenerationError
from minigpt.generation.choosing import next_logits, next_tokens
from minigpt.generation.row import Row
from minigpt.generation.slots import Slots
from minigpt.model import GPT2

NGRAMS = (3, 2)  # lengths of the n-grams to look up, the more specific first
MOST = 8  # tokens of a draft by the int8 form
FADING = 0.8  # what the older tokens count at each draft
MEASURED = 5  # times of which the median counts, since some steps are interrupted
FRESH = (1.0, 0.5)  # tokens that count as right and wrong at first
SUREST = 0.99  # the highest chance to count with
REST = 8  # steps without a draft, after which one token is tried; twice as many each time that it is refused
LONGEST_REST = 64
REPAYING = {torch.float32: 64, torch.bfloat16: 192}  # tokens of a text that repay the rounding of the weights


def copied(ids: list[int], most: int) -> list[int]:
    """Return up to ``most`` tokens that followed the last n-gram when it occurred before; [] if it is new.

    The copy may continue into itself, so a text that repeats itself is drafted as a repetition.
    """
    text = "".join(map(chr, ids))  # a string is searched faster than a list
    for size in NGRAMS:
        place = text.rfind(text[-size:], 0, -1)
        if place >= 0:
            after = ids[place + size :]
            return [after[i % len(after)] for i in range(most)]
    return []


class Pace:
    """Decides how many tokens to draft, by how many were right and how long steps and drafts take here.

    With a chance p that a drafted token is right, k drafted tokens give (1 - p^(k+1)) / (1 - p) tokens on average.
    """

    def __init__(self) -> None:
        self.right, self.wrong = FRESH
        # The last seconds of a step of one row, of a drafted token, and of a further row in a step.
        self.steps, self.drafts, self.rows = (deque[float](maxlen=MEASURED) for _ in range(3))
        self.resting, self.rest = 1, REST  # the first step is without a draft, to be timed
        self.is_trying = False

    def length(self) -> int:
        """Return how many tokens to draft next."""
        if self.resting or not self.steps:  # a step that others join is not timed
            self.resting = max(self.resting - 1, 0)
            return 0
        if self.is_trying:
            return 1
        p = min(self.right / (self.right + self.wrong), SUREST)
        step = median_low(self.steps)
        each = median_low(self.drafts or [step / 3]) + median_low(self.rows or [step / 16])
        best = max(range(MOST + 1), key=lambda k: (1 - p ** (k + 1)) / (step + k * each))
        if best == 0:
            self.resting, self.is_trying = self.rest, True
        return best

    def learn(self, drafted: int, right: int, drafting: float, reading: float) -> None:
        """Note how many tokens were drafted and right, and the seconds that the draft and its step took."""
        if not drafted:
            self.steps.append(reading)
            return
        self.drafts.append(drafting / drafted)
        self.rows.append(max(reading - median_low(self.steps or [reading]), 0) / drafted)
        self.right, self.wrong = FADING * self.right + right, FADING * self.wrong + (right < drafted)
        if right:
            self.rest = REST
        if self.is_trying and right:
            self.is_trying, (self.right, self.wrong) = False, FRESH
        elif self.is_trying:
            self.resting = self.rest = min(2 * self.rest, LONGEST_REST)


def drafts_for(model: GPT2, draft: str | None, most_copied: int = 0) -> "Drafts | None":
    """Return what guesses tokens, or None if there is nothing to guess with.

    Raises:
        ConfigError: as ``Drafts``.
    """
    draft = None if draft == "auto" and why_not_drafted(model) else draft
    return Drafts(model, most_copied, draft) if most_copied or draft else None


class Drafts:
    """Guesses the next tokens of a row: copied from its text if it has the last n-gram before, else written in int8.

    The int8 form reads the model's own cache. What it adds there is overwritten when the draft is verified.

    Args:
        most_copied: tokens to copy at most; 0 copies none.
        draft: "int8" for drafts by the int8 form; "auto" makes it when a text has enough tokens left to repay that.

    Raises:
        ConfigError: if the int8 form is asked for, and the decoding kernel does not serve the model.
    """

    def __init__(self, model: GPT2, most_copied: int = 0, draft: str | None = None) -> None:
        self.model, self.most_copied, self.is_auto = model, most_copied, draft == "auto"
        self.int8 = drafter_of(model) if draft == "int8" else None
        self.pace = Pace()
        self.is_written = False  # whether the last draft is the int8 form's

    def guess(self, row: Row, most: int, slots: Ragged | Slots) -> list[int]:
        """Return up to ``most`` tokens that may follow the only row in the cache."""
        draft = copied(row.ids, min(self.most_copied, most)) if self.most_copied else []
        if self.is_auto and (row.left + 1 >= REPAYING[self.model.wte.weight.dtype] or is_rounded(self.model)):
            self.is_auto = False
            with suppress(ConfigError):  # a weight that is not finite, or a hook since the beginning
                self.int8 = drafter_of(self.model)
        self.is_written = not draft and self.int8 is not None
        if not self.is_written:
            return draft
        assert isinstance(slots, Ragged)
        return self._written(row, min(self.pace.length(), most), slots)

    def learn(self, row: Row, drafted: int, right: int, drafting: float, reading: float) -> None:
        """Note how many tokens of a draft were right, and the seconds that the draft and its step took."""
        row.drafted, row.accepted = row.drafted + drafted, row.accepted + right
        if self.is_written:
            self.pace.learn(drafted, right, drafting, reading)

    def _written(self, row: Row, count: int, slots: Ragged) -> list[int]:
        """Return the tokens that the row would add if the int8 form were the model, with the row's random numbers."""
        assert self.int8 is not None
        known = len(row.ids)
        try:
            with suppress(GenerationError):  # the model itself says whether no token can be chosen
                for column in range(slots.lengths[0], slots.lengths[0] + count):
                    logits = self.int8(row.ids[-1:], slots.slots, [column], slots.store)  # (1, V)
                    row.ids += next_tokens(next_logits(self.model, logits), [row], keeps=False)
                    if row.ids[-1] in row.end_ids:
                        break
        finally:
            drafted = row.ids[known:]
            del row.ids[known:]
        return drafted
