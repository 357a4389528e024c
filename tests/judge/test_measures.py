"""Distances and distributions, each against a formula written out here or a function of PyTorch's own."""

import math

import pytest
import torch
from torch import Tensor

from minigpt.judge.gradients import relative_error
from minigpt.judge.measures import Distance, LogitsMeter, against_noise_floor
from minigpt.report.fields import WorstPosition

NOWHERE = WorstPosition(0, 0, None)


def distance(*pairs: tuple[Tensor, Tensor]) -> Distance:
    measured = Distance()
    for value, truth in pairs:
        measured.add(value, truth)
    return measured


def test_worked_example() -> None:
    actual = distance(
        (torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.0])), (torch.tensor([[1.0], [0.0]]), torch.ones(2, 1))
    )
    assert actual.largest == 1
    assert actual.rms == pytest.approx(math.sqrt(2 / 4))
    assert actual.scale == pytest.approx(math.sqrt((9 + 9 + 1 + 1) / 4))


def test_relative_errors() -> None:
    zeros, ones = torch.zeros(3), torch.ones(3)
    assert relative_error(torch.tensor([3.0, 4.0, 1.0, 0.0]), torch.tensor([3.0, 3.0, 1.0, 1.0])) == math.sqrt(2 / 20)
    assert relative_error(zeros, zeros) == 0
    assert relative_error(zeros + 1e-30, zeros) == math.inf
    assert math.isnan(relative_error(ones * math.nan, ones))


@pytest.mark.parametrize("place", ["value", "truth"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_nan_is_never_forgotten(place: str, position: int) -> None:
    """Whatever is counted before it or after it."""
    pairs = [(torch.ones(2, 2), torch.full((2, 2), 2.0)) for _ in range(3)]
    pairs[position][place == "truth"][1, 0] = math.nan
    actual = distance(*pairs)
    assert all(map(math.isnan, (actual.largest, actual.rms)))


def read(*texts: tuple[Tensor, Tensor, Tensor]) -> LogitsMeter:
    """A meter that has read (truth, candidate, targets)."""
    measured = LogitsMeter()
    for text in texts:
        measured.add(*text)
    return measured


def text(seq: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    truth = 2 * torch.randn(seq, vocab, dtype=torch.float64)
    return truth, truth.float(), torch.randint(vocab, (3,))


def test_kl_is_never_negative_and_0_of_the_truth_itself() -> None:
    """Rounding can take the sum below 0, by less than this."""
    actual = read(text(50, 997)).distribution(NOWHERE)
    assert 0 <= actual.kl_mean <= actual.kl_max < 1e-12


def test_a_nan_logit_shows_in_every_figure_that_a_verdict_uses() -> None:
    broken, whole = text(4, 13), text(4, 13)
    broken[1][2, 5] = math.nan
    for texts in ((broken, whole), (whole, broken)):
        actual = read(*texts)
        logits, distribution = (
            against_noise_floor(actual.distance, actual.without_shift, Distance()),
            actual.distribution(NOWHERE),
        )
        figures = (logits.rms_error, logits.max_abs_error, logits.ratio, distribution.kl_max, distribution.kl_mean)
        assert all(map(math.isnan, figures))


@pytest.mark.parametrize("error", [1e-6, 0.1, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_distribution_is_that_of_pytorch(error: float, dtype: torch.dtype) -> None:
    truth, _, targets = text(64, 997)
    logits = (truth + error * torch.randn(64, 997)).to(dtype)
    actual = read((truth, logits, targets)).distribution(NOWHERE)
    p, q = truth.log_softmax(-1), logits.double().log_softmax(-1)
    expected = {
        "kl_mean": float(torch.nn.functional.kl_div(q, p, log_target=True, reduction="batchmean")),
        "top1_agreement": float((truth.topk(1).indices == logits.topk(1).indices).double().mean()),
        "perplexity_candidate": math.exp(float(torch.nn.functional.nll_loss(q[:3], targets))),
    }
    for name, value in expected.items():
        difference = abs(getattr(actual, name) - value)
        print(f"{name}: difference {difference:.3g}, bound 1e-12 of {value:.3g}")
        assert difference <= 1e-12 * max(1, value)


def test_logits_of_minus_infinity_have_no_share() -> None:
    truth, logits, targets = text(4, 13)
    truth[:, 7] = -math.inf
    logits[:, 7] = -math.inf
    actual = read((truth, logits, targets)).distribution(NOWHERE)
    assert 0 <= actual.kl_max < 1e-12
    logits[:, 8] = -math.inf
    assert read((truth, logits, targets)).distribution(NOWHERE).kl_max == math.inf
