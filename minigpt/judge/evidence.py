"""Another program's logits, and our network's with mistakes in it: distances, and which of two is nearer.

T tokens, V vocabulary.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from minigpt.errors import raised
from minigpt.judge.mistakes import Mistake, Swaps
from minigpt.judge.runners import reads_apart

Run = Callable[[Int[Tensor, "1 seq"], int], Float[Tensor, "seq columns"]]  # of every so manyth logit
Hidden = Callable[[Int[Tensor, "1 seq"]], Float[Tensor, "seq embd"]]


@dataclass(frozen=True)
class Evidence:
    """A text that the program read.

    Attributes:
        ids: (1, T).
        logits: the program's (T, V), in float64, NaN where it has none.
        truth: of the right model (T, V), in float64.
        new_from: the length of the prompt, behind which the text was written.
        padding: how many tokens the prompt is shorter than the longest.
        least: the RMS error of a row that counts as none, if the program rounds in steps; 0 if it does not.
    """

    ids: Int[Tensor, "1 seq"]
    logits: Float[Tensor, "seq vocab"]
    truth: Float[Tensor, "seq vocab"]
    new_from: int = sys.maxsize
    padding: int = 0
    least: float = 0.0


class Network:
    """A model that computes logits with mistakes in it.

    Args:
        model: what the mistakes are put into.
        run: computes its logits, each or every so manyth.
        most: the longest text that it reads.
        rounded: opens the same model at the original's dtype; None if its weights stay in their files.
        hidden: computes what its head reads (T, C); None if that is not known.
        is_foreign: whether it is transformers' code, which may refuse a mistake; it gives NaN then.
        quick: the same model in float32, if its rounding is no more than the noise; else None.
        arithmetic: what the program rounds, which is put in on top of all mistakes.
    """

    def __init__(
        self,
        model: nn.Module,
        run: Run,
        most: int,
        rounded: Callable[[], "Network"] | None = None,
        hidden: Hidden | None = None,
        is_foreign: bool = False,
        quick: "Network | None" = None,
        arithmetic: Sequence[Mistake] = (),
    ) -> None:
        self.model, self.run, self.most, self.hidden, self.rounded = model, run, most, hidden, rounded
        self.is_foreign, self.reads_whole, self.quick = is_foreign, reads_apart(model), quick
        self.arithmetic = arithmetic

    def noise(self, mistakes: Sequence[Mistake], texts: Sequence[Evidence]) -> float:
        """Return the error of the model at the dtype, as ``Sums`` has it, with mistakes in both; 0 if not known."""
        if self.rounded is None:
            return 0.0
        network, sums = self.rounded(), Sums(texts[0].least)
        for text in texts:
            sums.add(network.logits(mistakes, text).double() - self.logits(mistakes, text))
        return sums.rms

    def logits(
        self, mistakes: Sequence[Mistake], text: Evidence, rows: int | None = None, step: int = 1
    ) -> Float[Tensor, "rows columns"]:
        """Return every ``step``-th logit of a text, or of its first rows; NaN if the mistakes make it too long."""
        is_causal = not self.reads_whole and all(mistake.is_causal for mistake in [*mistakes, *self.arithmetic])
        ids = text.ids[:, :rows] if is_causal else text.ids
        for mistake in mistakes:
            ids = mistake.ids(ids)
        if ids.shape[1] > self.most:
            return torch.full_like(text.truth[:rows, ::step], torch.nan)
        try:
            with Swaps(text.new_from, text.padding) as swaps:
                for mistake in [*sorted(mistakes, key=turn), *self.arithmetic]:
                    mistake.put(self.model, swaps)
                logits = self.run(ids, step)
        except raised():
            if not self.is_foreign or not mistakes:
                raise
            return torch.full_like(text.truth[:rows, ::step], torch.nan)
        return finished(mistakes, logits.to(text.truth.dtype), text, rows)


def turn(mistake: Mistake) -> int:
    """Return when a mistake is put in: -1 before others, 1 after them."""
    return mistake.moves_blocks - mistake.rebuilds


def finished(mistakes: Sequence[Mistake], logits: Tensor, text: Evidence, rows: int | None = None) -> Tensor:
    """Return a network's logits with what the mistakes do to them."""
    for mistake in mistakes:
        logits = mistake.logits(logits)
    logits = logits[:rows]
    for mistake in mistakes:
        if mistake.fit is not None:
            logits = mistake.fit(logits, text.logits[:rows])
    return logits


@dataclass
class Sums:
    """Sums over logits, of which distances and shares are made.

    Args:
        least: as ``Evidence`` has it.
    """

    least: float = 0.0
    rows: list[Float[Tensor, " rows"]] = field(default_factory=list)
    count: int = 0
    squares: float = 0.0
    product: float = 0.0
    others: float = 0.0

    def add(self, x: Tensor, other: Tensor | None = None) -> None:
        """Count the numbers of ``x`` that are not NaN, and their product with another tensor."""
        if self.least:
            self.rows.append(x.square().nanmean(-1).sqrt())
        known = ~x.isnan()
        if other is not None:
            known &= ~other.isnan()
        if not known.all():
            x = x[known]
            other = None if other is None else other[known]
        self.count += x.numel()
        self.squares += float(x.square().sum())
        if other is not None:
            self.others += float(other.square().sum())
            self.product += float((x * other).sum())

    @property
    def rms(self) -> float:
        """Root of the mean square, or the ``typical`` one of rows; infinite if nothing was counted."""
        if self.count == 0:
            return math.inf
        if self.least:
            return typical(torch.cat(self.rows), self.least)
        return math.sqrt(self.squares / self.count)

    @property
    def share(self) -> float:
        """The multiple of the other tensor that is nearest: 1 if it is there once, 0 if it is not there."""
        if self.others == 0:
            return 0.0
        return self.product / self.others


def typical(errors: Float[Tensor, " rows"], least: float) -> float:
    """Return the geometric mean of the rows' RMS errors that are not NaN; infinite if all are NaN.

    A number near the middle of two steps may be rounded the other way, and changes its row and later ones by far more
    than noise. So few such rows count little here, and a mistake that is small moves none of the others.

    Args:
        least: the error of a row that counts as none.
    """
    known = errors[~errors.isnan()]
    return float(known.clamp(min=least).log().mean().exp()) if len(known) else math.inf


class Prediction:
    """The network's outputs on all texts with some mistakes in it.

    Attributes:
        mistakes: in the order in which they were found.
        logits: of each text.
        distance: RMS distance of the program's logits from them; the ``typical`` one of rows if it rounds in steps.
        share: how much of the mistakes' effect the program's error has.
        effect: RMS of what the mistakes do to the truth.
    """

    def __init__(self, mistakes: Sequence[Mistake], texts: Sequence[Evidence], logits: list[Tensor]) -> None:
        self.mistakes, self.texts, self.logits = tuple(mistakes), texts, logits
        distance, effects = Sums(texts[0].least), Sums()
        for text, predicted in zip(texts, logits, strict=True):
            effect = predicted - text.truth
            distance.add(text.logits - predicted)
            effects.add(text.logits - text.truth, effect)
        self.distance = distance.rms
        self.known = distance.count
        self.share = effects.share
        self.effect = math.sqrt(effects.others / max(effects.count, 1))

    def towards(self, other: "Prediction") -> tuple[float, float]:
        """Return how far another prediction is, and the share of the way to it that the program's logits are."""
        sums = Sums()
        for text, mine, its_logits in zip(self.texts, self.logits, other.logits, strict=True):
            sums.add(text.logits - mine, its_logits - mine)
        return math.sqrt(sums.others / max(sums.count, 1)), sums.share

    @property
    def families(self) -> tuple[str, ...]:
        """The kinds of the mistakes, without their places."""
        return tuple(mistake.kind for mistake in self.mistakes)


def predict(network: Network, mistakes: Sequence[Mistake], texts: Sequence[Evidence]) -> Prediction:
    """Let a network read all texts with mistakes in it."""
    logits = []
    for text in texts:
        logits.append(network.logits(mistakes, text))
    return Prediction(mistakes, texts, logits)
