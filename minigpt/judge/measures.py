"""Distances between tensors and between next-token distributions, collected over many texts in float64.

T tokens, V vocabulary, C embedding.
"""

import dataclasses
import math
import sys
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from minigpt.report.parity_report import Fields

AT_ONCE = 128  # positions whose logits are compared together: those of 1,024 take 400 MB in float64


@dataclasses.dataclass
class Distance:
    """How far tensors are from their truth. A NaN in either shows in every figure."""

    largest: float = 0.0
    count: int = 0
    squares: float = 0.0
    true_squares: float = 0.0

    def add(self, value: Tensor, truth: Tensor) -> None:
        """Count a pair of equal shape; an empty one counts nothing."""
        if truth.numel() == 0:
            return
        truth = truth.double()
        difference = value.double() - truth
        self.largest = float(np.maximum(self.largest, float(difference.abs().max())))  # NaN if either is
        self.squares += float(difference.square().sum())
        self.true_squares += float(truth.square().sum())
        self.count += truth.numel()

    @property
    def rms(self) -> float:
        """Root of the mean squared difference."""
        return math.sqrt(self.squares / max(self.count, 1))

    @property
    def scale(self) -> float:
        """Root of the truth's mean square."""
        return math.sqrt(self.true_squares / max(self.count, 1))

    @property
    def relative(self) -> float:
        """RMS of the difference over RMS of the truth."""
        if self.squares == 0:
            return 0.0
        return math.sqrt(self.squares / self.true_squares) if self.true_squares else math.inf


@dataclasses.dataclass
class RowDistance:
    """How far rows are from their truth, each measured by its own size, so that no massive row hides the others."""

    count: int = 0
    squares: float = 0.0

    def add(self, value: Float[Tensor, "seq embd"], truth: Float[Tensor, "seq embd"]) -> None:
        """Count rows of equal shape."""
        truth = truth.double()
        errors, sizes = (value.double() - truth).square().sum(-1), truth.square().sum(-1)  # (T)
        self.squares += float(torch.where(errors == 0, 0, errors / sizes).sum())
        self.count += len(truth)

    @property
    def relative(self) -> float:
        """Root of the mean, over rows, of the squared difference over the squared truth."""
        return math.sqrt(self.squares / max(self.count, 1))


class TextSums(NamedTuple):
    """Sums over one text: positions and their KL and agreement, targets and their loss in nats."""

    positions: int
    kl: float
    top1: float
    targets: int
    true_loss: float
    loss: float


class LogitsMeter:
    """A candidate's logits and next-token distributions against the truth, over many texts.

    Attributes:
        kl: KL divergence in nats at every position of each text.
        errors: RMS error of the logits at every position of each text.
        distances: of each text; ``distance`` is of all together.
    """

    def __init__(self) -> None:
        self.distance = Distance()
        self.distances: list[Distance] = []
        self.rows: list[TextSums] = []
        self.kl: list[Float[Tensor, " seq"]] = []
        self.errors: list[Float[Tensor, " seq"]] = []
        self.top5: list[Float[Tensor, " seq"]] = []

    def add(
        self, truth: Float[Tensor, "seq vocab"], logits: Float[Tensor, "seq vocab"], targets: Int[Tensor, " targets"]
    ) -> None:
        """Count one text. ``targets`` are the tokens that its first positions should have predicted."""
        distance, parts = Distance(), []
        for true_part, part, predicted in _parts(truth, logits, targets):
            self.distance.add(part, true_part)
            distance.add(part, true_part)
            parts.append(_compare(true_part.double(), part.double(), predicted))
        kl, top1, top5, errors, true_loss, loss = (torch.cat(column) for column in zip(*parts, strict=True))
        self.distances.append(distance)
        self.kl.append(kl)
        self.top5.append(top5)
        self.errors.append(errors)
        sums = [float(column.sum()) for column in (kl, top1, true_loss, loss)]
        self.rows.append(TextSums(len(kl), sums[0], sums[1], len(targets), sums[2], sums[3]))

    def distribution(self) -> Fields:
        """Return KL, agreement and loss, with standard errors by texts; NaN where there is one text only."""
        kl, rows = torch.cat(self.kl), self.rows
        positions, targets = [row.positions for row in rows], [row.targets for row in rows]
        kl_mean, kl_se = mean_by_rows([row.kl for row in rows], positions)
        top1, top1_se = mean_by_rows([row.top1 for row in rows], positions)
        change, change_se = mean_by_rows([row.loss - row.true_loss for row in rows], targets)
        return Fields(
            tokens=len(kl),
            top1_agreement=top1,
            top1_agreement_se=top1_se,
            top5_agreement=float(torch.cat(self.top5).mean()),
            kl_mean=kl_mean,
            kl_mean_se=kl_se,
            kl_median=float(kl.quantile(0.5)),
            kl_p999=float(kl.quantile(0.999)),
            kl_max=float(kl.max()),
            perplexity_reference=perplexity_of(sum(row.true_loss for row in rows), sum(targets)),
            perplexity_candidate=perplexity_of(sum(row.loss for row in rows), sum(targets)),
            loss_change=change,
            loss_change_se=change_se,
        )


def _parts(truth: Tensor, logits: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for start in range(0, len(truth), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        yield truth[part], logits[part], targets[part]


def _compare(truth: Tensor, logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """Return KL, agreement of the likeliest and of the five likeliest, RMS error, and both losses, by position."""
    p, q = truth.log_softmax(-1), logits.log_softmax(-1)  # (T, V)
    return (
        kl_divergence(p, q),
        top_overlap(logits, truth, 1),
        top_overlap(logits, truth, min(5, truth.shape[-1])),
        (logits - truth).square().mean(-1).sqrt(),
        -p[: len(targets)].gather(1, targets[:, None])[:, 0],
        -q[: len(targets)].gather(1, targets[:, None])[:, 0],
    )


def mean_by_rows(sums: list[float], counts: list[int]) -> tuple[float, float]:
    """Return the mean of all items and its standard error, from the sums and counts of independent rows.

    The error is that of a ratio of sums (Cochran 1977, section 6.3); NaN with fewer than two rows that count.
    """
    total = sum(counts)
    if total == 0:
        return math.nan, math.nan
    mean, rows = sum(sums) / total, sum(count > 0 for count in counts)
    residuals = sum((part - mean * count) ** 2 for part, count in zip(sums, counts, strict=True))
    return mean, math.sqrt(residuals * rows / (rows - 1)) / total if rows > 1 else math.nan


def over_floor(candidate: Distance, reference: Distance) -> Fields:
    """Return the candidate's distance from the truth beside the reference's, which is the noise floor."""
    return Fields(
        max_abs_error=candidate.largest,
        rms_error=candidate.rms,
        scale=candidate.scale,
        noise_floor_max=reference.largest,
        noise_floor_rms=reference.rms,
        ratio=over_noise(candidate.rms, reference.rms, candidate.scale),
    )


def over_noise(rms_error: float, noise_floor: float, scale: float) -> float:
    """Return an RMS error as a multiple of the noise floor, which is at least the truth's own rounding."""
    return rms_error / (noise_floor or 8 * sys.float_info.epsilon * (scale or 1.0))


def kl_divergence(p: Float[Tensor, "seq vocab"], q: Float[Tensor, "seq vocab"]) -> Float[Tensor, " seq"]:
    """KL(p || q) in nats, of log probabilities. Rounding may leave it just below 0; it is clamped to 0."""
    term = p.exp() * (p - q)
    return term.masked_fill(p == -math.inf, 0).sum(-1).clamp(min=0)


def top_overlap(a: Float[Tensor, "seq vocab"], b: Float[Tensor, "seq vocab"], k: int) -> Float[Tensor, " seq"]:
    """Share of the k likeliest tokens that both have, in any order."""
    of_a, of_b = a.topk(k).indices, b.topk(k).indices  # (T, k)
    return (of_a[:, :, None] == of_b[:, None, :]).any(-1).double().mean(-1)


def perplexity_of(loss: float, targets: int) -> float:
    """exp of the mean loss in nats; NaN if there was nothing to predict, infinite if it overflows."""
    return (torch.tensor(loss, dtype=torch.float64) / targets).exp().item()


def exact_layer_norm(
    x: Float[Tensor, "*dims embd"], weight: Tensor, bias: Tensor | None, eps: float
) -> Float[Tensor, "*dims embd"]:
    """LayerNorm of ``x`` in float64."""
    return F.layer_norm(x.double(), weight.shape, weight.double(), None if bias is None else bias.double(), eps)
