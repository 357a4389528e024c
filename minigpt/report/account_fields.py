"""An account of where a quantized file's difference from its original comes from, with the names of a report's JSON."""

import math
from dataclasses import dataclass, field
from typing import Annotated

from minigpt.report.noise import MOST_NOISE
from minigpt.report.numerals import precise, times
from minigpt.report.part import Shown


@dataclass(frozen=True)
class ErrorShare:
    """A part of a file's difference from the original.

    Attributes:
        ratio: RMS error over that of transformers at the dtype, with the file's weights.
        kl: the mean KL divergence.
        perplexity: of the logits that are off; None of a program's parts.
    """

    part: str
    ratio: Annotated[float, Shown("error", times)]
    kl: Annotated[float, Shown("KL divergence, mean")]
    perplexity: Annotated[float | None, Shown("perplexity", precise)] = None


@dataclass(frozen=True)
class TensorShare:
    """The cost of one tensor's rounding in a file: the mean KL divergence of transformers in float64.

    Attributes:
        kind: how the file stores the tensor.
        alone: of the original with the file's tensor in it.
        without: of the file's model with the original's tensor in it.
    """

    site: str
    kind: str
    alone: Annotated[float, Shown("KL divergence, alone in the original")]
    without: Annotated[float, Shown("KL divergence of the file without it")]


@dataclass(frozen=True, kw_only=True)
class Account:
    """The difference of a program that computes a file of its own from the original, by where it comes from.

    Attributes:
        types: how the file stores its tensors, but for float32.
        tokens: whose logits the shares are of; ``positions`` has those of short texts too.
        perplexity: of the original.
        total: the program, against the original.
        weights: transformers in float64 with the file's weights, against the original.
        own: the program, against transformers in float64 with the file's weights.
        precisions: transformers in other dtypes, with the file's weights; ``dtype`` is that of the ratios.
        steps: ``own``, with what the program documents that it rounds in the truth, one on top of the other.
        effect: all of that arithmetic, in transformers in float64.
        noise: transformers at the dtype, with the same arithmetic in it and in the truth.
        calm: how many positions are compared where the error is least; ``calm_left`` is the program's RMS error there,
            and ``calm_noise`` that of transformers at the dtype, both with the arithmetic in the truth.
        decides: whether the verdict is on the program and its file, and not on the original.
        strange: a sentence on each tensor of the file that is not the original's.
        tensors: the cost of each, the most first; None if it was not asked for.
    """

    program: str
    types: list[str]
    tokens: int
    positions: int
    perplexity: float | None
    total: ErrorShare
    weights: ErrorShare
    own: ErrorShare
    dtype: str
    precisions: list[ErrorShare]
    steps: list[ErrorShare]
    effect: float
    noise: float
    calm: int
    calm_left: float
    calm_noise: float
    decides: bool
    strange: list[str] = field(default_factory=list)
    tensors: list[TensorShare] | None = None

    @property
    def left(self) -> float:
        """The ratio of what the documented arithmetic leaves."""
        return [self.own, *self.steps][-1].ratio

    @property
    def explains(self) -> bool:
        """True if what is left is noise: of transformers at the dtype, with the documented arithmetic in it."""
        if self.own.ratio <= MOST_NOISE:
            return True
        is_calm = self.calm_left <= MOST_NOISE * max(1.0, self.calm_noise)
        return is_calm and self.left <= max(MOST_NOISE * self.noise, self.effect)

    @property
    def blames_file(self) -> bool:
        """True if the file is another model: it rounds nothing, and is off all the same."""
        return not self.types and self.weights.ratio > MOST_NOISE

    @property
    def is_by_rounding(self) -> bool:
        """True if rounding alone makes the difference from the original: of the file's weights and of the program."""
        return self.explains and not self.blames_file

    @property
    def together(self) -> float:
        """The root of the squares of both errors, over that of all: near 1, since they are independent."""
        return math.hypot(self.weights.ratio, self.own.ratio) / (self.total.ratio or 1.0)
