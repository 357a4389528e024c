"""Drafts: guess a text's next tokens cheaply, and let the model verify all of them in one step.

The model's own int8 form writes the draft. It is verified as in speculative decoding (Leviathan et al. 2023, arXiv
2211.17192). Every token is still chosen from the model's own logits, with the row's own random number, so the text is
the same as without a draft. A correct token of the draft saves a step; a wrong one wastes its part of one.
"""

import time
from collections import deque
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from statistics import median_low
from weakref import WeakKeyDictionary

from minigpt.engine.int8 import drafter_of, int8_share, rounding_seconds, why_not_drafted
from minigpt.engine.reader import Reader
from minigpt.engine.step import StepKernel
from minigpt.errors import ConfigError, GenerationError
from minigpt.generation.choosing import next_tokens
from minigpt.generation.row import Row
from minigpt.model import GPT2

MOST_DRAFTED = 15  # tokens of a draft, which are verified as 16 rows
TRIAL = 16  # steps without a draft, after which one token is tried
MEASURED = 5  # times of which the median counts, since some steps are interrupted
FADING = 0.8  # what older tokens count at each draft
GAIN = 1.1  # drafts must make a text this many times as fast
VERIFYING = 0.1  # of a step, for each token of a draft, until it is measured
CHANCES = {False: 0.97, True: 0.85}  # that a drafted token is right, greedy and sampled, until it is measured


class DraftLength:
    """Chooses how many tokens to draft: as many as give the most tokens a second, by what was measured.

    With a chance p that a drafted token is right, k drafted tokens give (1 - p^(k+1)) / (1 - p) tokens on average.
    """

    def __init__(self) -> None:
        self.right, self.wrong = 1.8, 0.2  # drafted tokens, the older ones fading
        self.plain = deque[float](maxlen=MEASURED)  # seconds of a step without a draft
        self.each = deque[float](maxlen=MEASURED)  # seconds of a drafted token
        self.steps = 0

    def expect(self, samples: bool) -> None:
        """Assume a chance that a drafted token is right, before any is drafted."""
        self.right, self.wrong = 2 * CHANCES[samples], 2 * (1 - CHANCES[samples])

    def next(self) -> int:
        """Return the length of the next draft."""
        self.steps += 1
        if not self.plain or not self.each:
            return min(len(self.plain), 1)  # the first step has no draft, and the next one token
        step = median_low(self.plain)
        best, seconds = self.best(step, median_low(self.each))
        if step > GAIN * seconds:
            return best
        is_trial = self.steps % TRIAL == 0
        return int(is_trial)

    def best(self, step: float, each: float) -> tuple[int, float]:
        """Return the best length and the seconds of a token then; by the seconds of a step and of a drafted token."""
        p = self.right / (self.right + self.wrong)
        best, least_seconds = 0, step
        tokens = 1.0  # that a draft of this length gives on average
        for length in range(1, MOST_DRAFTED + 1):
            tokens += p**length
            seconds = (step + length * each) / tokens
            if seconds < least_seconds:
                best, least_seconds = length, seconds
        return best, least_seconds

    def repays(self, tokens: int, share: float, rounding: Callable[[], float]) -> bool:
        """Return True if so many tokens probably repay the rounding of the weights.

        Args:
            share: the bytes of a weight in eight bits, of those of the model's own.
            rounding: returns the seconds that the rounding takes.
        """
        if len(self.plain) <= MEASURED // 2:
            return False
        step = min(self.plain)  # some were interrupted, and would promise too much
        _, seconds = self.best(step, (share + VERIFYING) * step)
        return step > GAIN * seconds and tokens * (step - seconds) > rounding()

    def learn(self, drafted: int, right: int, seconds: float) -> None:
        """Note how many tokens of the last draft were right, and the seconds that it and its step took."""
        if not drafted:
            self.plain.append(seconds)
            return
        step = median_low(self.plain or [seconds])
        self.each.append(max(seconds - step, 0) / drafted)
        self.right = FADING * self.right + right
        self.wrong = FADING * self.wrong + (right < drafted)


_lengths: MutableMapping[GPT2, DraftLength] = WeakKeyDictionary()  # so that the next text begins with what was measured


def drafts_for(model: GPT2, draft: str | None) -> "Drafts | None":
    """Return what guesses tokens; None if ``draft`` is None, or "auto" and drafts would not pay.

    Raises:
        ConfigError: as ``Drafts``.
    """
    if draft is None:
        return None
    if draft == "auto" and why_not_drafted(model):
        return None
    return Drafts(model, draft)


class Drafts:
    """Guesses the next tokens of the only row of a batch.

    The int8 form reads the model's own cache. What it adds there is overwritten when the draft is verified.

    Args:
        draft: "int8" makes the int8 form now; "auto" when that probably makes the rest of a text faster: it times the
            first steps, and how long one layer takes to round.

    Raises:
        ConfigError: if draft is "int8", and the decoding kernel does not serve the model.
    """

    def __init__(self, model: GPT2, draft: str) -> None:
        self.model, self.is_auto = model, draft == "auto"
        self.can_draft = True
        self.int8: dict[bool, StepKernel] = {}  # by whether tokens are drawn at random
        if not self.is_auto:
            self.int8[True] = drafter_of(model)
        self.length = _lengths.setdefault(model, DraftLength())
        self._rounding: dict[bool, float] = {}  # seconds, by whether tokens are drawn at random
        self._begun = 0.0

    def guess(self, row: Row, reader: Reader) -> list[int] | None:
        """Return tokens that may follow the only row, which are verified with its last token; None without a kernel."""
        if reader.kernel is None or not self.can_draft:
            return None
        samples = row.settings.samples
        if not self.length.each:
            self.length.expect(samples)
        int8 = self.int8.get(samples)
        if int8 is None or int8.is_outdated():
            int8 = self._make_int8(samples, row.left + 1)
        self._begun = time.perf_counter()
        if int8 is None:
            return []  # the step is timed
        first = reader.lengths[0]
        room = min(row.left, reader.columns - first) - 1
        length = min(self.length.next(), room)
        return self._written(int8, row, range(first, first + length), reader)

    def _make_int8(self, samples: bool, tokens: int) -> StepKernel | None:
        """Make the int8 form: with draft "auto" if it makes so many tokens faster, or the model has changed."""
        is_outdated = self.int8.pop(samples, None) is not None  # so that an error leaves none
        is_wanted = is_outdated or not self.is_auto
        try:
            share = int8_share(self.model, is_greedy=not samples)
            if is_wanted or self.length.repays(tokens, share, lambda: self._rounding_seconds(samples)):
                self.int8[samples] = drafter_of(self.model, is_greedy=not samples)
        except ConfigError:  # a weight that is not finite, or a hook since the beginning
            self.can_draft = False
        return self.int8.get(samples)

    def _rounding_seconds(self, samples: bool) -> float:
        """Return how long the rounding of the weights takes, measured once.

        Raises:
            ConfigError: as ``rounding_seconds``.
        """
        if samples not in self._rounding:
            self._rounding[samples] = rounding_seconds(self.model, is_greedy=not samples)
        return self._rounding[samples]

    def learn(self, row: Row, drafted: int, right: int) -> None:
        """Note how many tokens of the last draft were right, after its step."""
        row.drafted += drafted
        row.accepted += right
        seconds = time.perf_counter() - self._begun
        self.length.learn(drafted, right, seconds)

    def _written(self, int8: StepKernel, row: Row, columns: range, reader: Reader) -> list[int]:
        """Return the tokens that the row would add if the int8 form were the model, with the row's random numbers."""
        ahead = row.ahead()
        with suppress(GenerationError):  # the model itself says whether no token can be chosen
            for column in columns:
                logits = int8(ahead.ids[-1:], [0], [column], reader.store)  # (1, V)
                ahead.ids += next_tokens(self.model, logits, [ahead], keeps=False)
                if ahead.ids[-1] in row.end_ids:
                    break
        return ahead.ids[len(row.ids) :]
