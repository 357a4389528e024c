"""Distances between tensors and between next-token distributions, collected over many texts in float64."""

import math
import sys

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from minigpt.judge.report import Fields

# T tokens, V vocabulary


class Distance:
    """How far tensors are from their truth. A NaN in either shows in every figure."""

    def __init__(self) -> None:
        self.largest, self.count = 0.0, 0
        self.squares, self.true_squares = 0.0, 0.0

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


class LogitsMeter:
    """A candidate's logits and next-token distributions against the truth, over many texts."""

    def __init__(self) -> None:
        self.distance = Distance()
        self.kl: list[Float[Tensor, " seq"]] = []  # nats, of each text
        self.top1: list[Tensor] = []
        self.top5: list[Tensor] = []
        self.true_loss, self.loss, self.targets = 0.0, 0.0, 0

    def add(
        self, truth: Float[Tensor, "seq vocab"], candidate: Float[Tensor, "seq vocab"], targets: Int[Tensor, " targets"]
    ) -> None:
        """Count one text. ``targets`` are the tokens that its first positions should have predicted."""
        self.distance.add(candidate, truth)
        self.top1.append(top_overlap(candidate, truth, 1))
        self.top5.append(top_overlap(candidate, truth, min(5, truth.shape[-1])))
        p, q = truth.log_softmax(-1), candidate.double().log_softmax(-1)  # (T, V)
        self.kl.append(kl_divergence(p, q))
        said = targets[:, None]  # (targets, 1)
        self.true_loss -= float(p[: len(targets)].gather(1, said).sum())
        self.loss -= float(q[: len(targets)].gather(1, said).sum())
        self.targets += len(targets)

    def distribution(self) -> Fields:
        kl = torch.cat(self.kl)
        return Fields(
            top1_agreement=float(torch.cat(self.top1).mean()),
            top5_agreement=float(torch.cat(self.top5).mean()),
            kl_mean=float(kl.mean()),
            kl_median=float(kl.quantile(0.5)),
            kl_p999=float(kl.quantile(0.999)),
            kl_max=float(kl.max()),
            perplexity_reference=perplexity_of(self.true_loss, self.targets),
            perplexity_candidate=perplexity_of(self.loss, self.targets),
        )


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
    mine, theirs = a.topk(k).indices, b.topk(k).indices  # (T, k)
    return (mine[:, :, None] == theirs[:, None, :]).any(-1).double().mean(-1)


def perplexity_of(loss: float, targets: int) -> float:
    """exp of the mean loss in nats; NaN if there was nothing to predict, infinite if it overflows."""
    return (torch.tensor(loss, dtype=torch.float64) / targets).exp().item()
