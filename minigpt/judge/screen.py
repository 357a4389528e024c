"""What a search for mistakes compares: effects on a few rows of a text, and the part of an error that is rounding.

T tokens, V vocabulary, N mistakes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minigpt.judge.evidence import Evidence, Network, typical
from minigpt.judge.mistakes import Mistake
from minigpt.judge.mistakes.text import centred
from minigpt.report.noise import MOST_NOISE, NEAR, noise_ratio


@dataclass(frozen=True)
class Limits:
    """The numbers that decide a diagnosis. Of the noise floor, if nothing else is said."""

    rows: int = 16  # of a text on which every mistake is tried: more tell no more, and take longer
    after: int = 8  # of these from the first one on that is off
    columns: int = 4096  # logits of a position that are compared there: a vocabulary has many like them
    slack: float = 1.5  # the noise of one text may be so many times that of all
    invisible: float = 0.1  # an effect that is smaller cannot be seen
    close: float = 1.5  # a mistake so many times as far as the nearest may be the nearest on all texts
    finals: int = 6  # mistakes that are compared on all texts, which takes longest
    bases: int = 2  # nearest mistakes on top of which the logits are changed or fitted
    pair_work: float = 1e11  # weights times tokens times pairs of the nearest mistakes: some minutes
    kind_work: float = 2e11  # the same of pairs by kind, and of mistakes in one block alone
    firsts: int = 5  # nearest mistakes with which others are tried
    added: int = 24  # pairs whose effects add up to the error best: a sum of effects is near that of both
    smallest_effect: float = 1 / 8  # of a second mistake alone, over what the first one leaves
    largest_effect: float = 50.0  # the same: two large effects may cancel
    simpler: float = 0.5  # of the simpler explanation's distance that a less simple one may leave
    known: float = 0.5  # of the logits on which a prediction must say something
    apart: float = 0.05  # predictions that are closer are one
    tied: float = 0.2  # of the way to another prediction: the program may as well be there
    whole: float = 0.2  # the share of a mistake's effect may differ from 1 by this, as another one may be there too
    remnant: float = 0.05  # of the logits: what a mistake that explains a part may leave
    certain: float = 5.0  # a mistake that explains a part must bring the error down by this factor
    own_noise: float = 4.0  # only so much less error lets a mistake have more noise than the right model


LIMITS = Limits()


@dataclass(frozen=True)
class Noise:
    """The part of an error that rounding explains.

    Attributes:
        floor: transformers' RMS error at the dtype.
        scale: RMS of the true logits.
        precisions: transformers' RMS error in each dtype.
        row: the error of a row that counts as none, as ``Evidence.least``.
    """

    floor: float
    scale: float
    precisions: Mapping[str, float]
    row: float = 0.0

    @property
    def least(self) -> float:
        """The floor, which is at least the rounding of float64."""
        return 1 / noise_ratio(1.0, self.floor, self.scale)

    def is_like_a_half(self, distance: float) -> bool:
        """Return whether an error is that of a format narrower than the dtype."""
        for error in self.precisions.values():
            if error > MOST_NOISE * self.floor and error / NEAR <= distance <= error * NEAR:
                return True
        return False


class Screen:
    """Effects of mistakes on some rows of a text, up to ``end``, without the mean of each position."""

    def __init__(self, network: Network, text: Evidence, end: int) -> None:
        self.network, self.text, self.end = network.quick or network, text, end
        self.step = max(1, text.truth.shape[-1] // LIMITS.columns)
        truth, logits = (self._flat(whole[:end, :: self.step]) for whole in (text.truth, text.logits))
        self.error = (logits - truth).float()
        self.known = ~self.error.isnan()
        self.error = self.error[self.known]
        self.right = self._flat(self.network.logits((), text, end, self.step))
        self.effects: dict[Mistake, Tensor] = {}
        self.distances: dict[tuple[Mistake, ...], float] = {(): self.size(self.error)}

    def _flat(self, logits: Tensor) -> Tensor:
        rows = logits[max(0, self.end - LIMITS.rows) :]
        return centred(rows).flatten()  # a shift of all logits changes no probability

    def add(self, mistake: Mistake) -> None:
        """Put a mistake into the network."""
        self.effects[mistake] = self.effect((mistake,))

    def distance(self, *mistakes: Mistake) -> float:
        """Return how far the program is from the network with the mistakes in it."""
        if mistakes not in self.distances:
            only = self.effects.get(mistakes[0]) if len(mistakes) == 1 else None
            effect = self.effect(mistakes) if only is None else only
            self.distances[mistakes] = self.size(self.error - effect)
        return self.distances[mistakes]

    def size(self, left: Tensor) -> float:
        """Return the RMS of what is left of the error; the ``typical`` one of rows if the program rounds in steps."""
        if not self.text.least:
            return rms_of(left)
        rows = left.new_full(self.known.shape, torch.nan).masked_scatter(self.known, left)
        rows = rows.view(min(self.end, LIMITS.rows), -1).square().nanmean(-1)
        return typical(rows.sqrt(), self.text.least)

    def effect(self, mistakes: Sequence[Mistake]) -> Tensor:
        """Return what mistakes do to the truth."""
        logits = self.network.logits(mistakes, self.text, self.end, self.step)
        difference = self._flat(logits) - self.right
        return difference[self.known].float().nan_to_num(0.0)  # a mistake need not determine each row


def rms_of(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())
