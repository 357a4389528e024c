"""Distances and distributions, each against a formula written out here or a function of PyTorch's own."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minigpt.judge.measures import Distance, LogitsMeter, nan_max, over_floor


def distance(*pairs: tuple[Tensor, Tensor]) -> Distance:
    measured = Distance()
    for value, truth in pairs:
        measured.add(value, truth)
    return measured


def test_worked_example() -> None:
    found = distance(
        (torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.0])), (torch.tensor([[1.0], [0.0]]), torch.ones(2, 1))
    )
    assert found.largest == 1
    assert found.rms == pytest.approx(math.sqrt(2 / 4))
    assert found.scale == pytest.approx(math.sqrt((9 + 9 + 1 + 1) / 4))
    assert found.relative == pytest.approx(math.sqrt(2 / 20))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_same_over_pieces_as_over_the_whole_and_in_float64(dtype: torch.dtype) -> None:
    truth = torch.randn(7, 11, dtype=torch.float64)
    value = (truth + 1e-3 * torch.randn_like(truth)).to(dtype)
    found, whole = distance((value[:2], truth[:2]), (value[2:], truth[2:])), value.double() - truth
    assert found.largest == whole.abs().max()
    assert found.rms == pytest.approx(whole.square().mean().sqrt().item(), rel=1e-12)
    assert found.scale == pytest.approx(truth.square().mean().sqrt().item(), rel=1e-12)
    assert found.relative == pytest.approx((whole.norm() / truth.norm()).item(), rel=1e-12)


def test_a_difference_that_float32_could_not_hold() -> None:
    truth = torch.full((3,), 1.0, dtype=torch.float64)
    assert distance((truth + 1e-12, truth)).rms == pytest.approx(1e-12, rel=1e-3)


def test_equal_tensors_are_exactly_0_apart() -> None:
    x = torch.randn(4, 5).bfloat16()
    found = distance((x, x))
    assert (found.largest, found.rms, found.relative) == (0.0, 0.0, 0.0)


def test_a_truth_of_zeros() -> None:
    zeros = torch.zeros(3)
    assert distance((zeros, zeros)).relative == 0
    assert distance((zeros + 1e-30, zeros)).relative == math.inf


@pytest.mark.parametrize("place", ["value", "truth"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_nan_is_never_forgotten(place: str, position: int) -> None:
    """Whatever is counted before it or after it."""
    pairs = [(torch.ones(2, 2), torch.full((2, 2), 2.0)) for _ in range(3)]
    pairs[position][place == "truth"][1, 0] = math.nan
    found = distance(*pairs)
    assert all(map(math.isnan, (found.largest, found.rms, found.relative)))


def test_infinity_stays_infinite() -> None:
    found = distance((torch.tensor([1.0, math.inf]), torch.ones(2)), (torch.ones(2), torch.ones(2)))
    assert (found.largest, found.rms, found.relative) == (math.inf, math.inf, math.inf)


def test_the_larger_of_two_or_nan() -> None:
    assert (nan_max(1.0, 2.0), nan_max(2.0, 1.0), nan_max(1.0, math.inf)) == (2, 2, math.inf)
    assert math.isnan(nan_max(math.nan, 1.0))
    assert math.isnan(nan_max(1.0, math.nan))


def meter(*texts: tuple[Tensor, Tensor, Tensor]) -> LogitsMeter:
    """A meter that has read (truth, candidate, targets)."""
    measured = LogitsMeter()
    for text in texts:
        measured.add(*text)
    return measured


def text(seq: int, targets: int, vocab: int = 13, noise: float = 0.5) -> tuple[Tensor, Tensor, Tensor]:
    truth = 2 * torch.randn(seq, vocab, dtype=torch.float64)
    return truth, (truth + noise * torch.randn_like(truth)).float(), torch.randint(vocab, (targets,))


def test_a_distribution_is_what_pytorch_computes_over_all_tokens_of_all_texts() -> None:
    """Texts of unequal length: a mean of means would be another number."""
    texts = [text(9, 4), text(2, 1)]
    found = meter(*texts).distribution()
    truth, candidate = torch.cat([text[0] for text in texts]), torch.cat([text[1] for text in texts])
    kl = F.kl_div(candidate.double().log_softmax(-1), truth.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    assert found.kl_mean == pytest.approx(kl.mean().item(), rel=1e-9)
    assert found.kl_max == pytest.approx(kl.max().item(), rel=1e-9)
    same = (candidate.argmax(-1) == truth.argmax(-1)).double().mean().item()
    print(f"top-1 agreement {same:.3f}, KL {kl.mean():.3g}")
    assert 0 < same < 1, "the texts of this test show nothing"
    assert found.top1_agreement == pytest.approx(same)


@pytest.mark.parametrize("which", ["reference", "candidate"])
def test_perplexity_is_that_of_the_targets_alone(which: str) -> None:
    texts = [text(9, 4), text(6, 5)]
    found = getattr(meter(*texts).distribution(), f"perplexity_{which}")
    logits = torch.cat([text[which == "candidate"][: len(text[2])].double() for text in texts])
    wanted = F.cross_entropy(logits, torch.cat([text[2] for text in texts])).exp().item()
    assert found == pytest.approx(wanted, rel=1e-9)


def test_perplexity_of_no_target_is_nan_and_an_overflow_is_infinite() -> None:
    assert math.isnan(meter(text(3, 0)).distribution().perplexity_candidate)
    truth, candidate, targets = text(3, 2)
    candidate[:, targets] = -1e6
    assert meter((truth, candidate, targets)).distribution().perplexity_candidate == math.inf


def test_kl_is_never_negative_and_0_of_the_truth_itself() -> None:
    """Rounding can take the sum below 0, by less than this."""
    truth, _, targets = text(50, 3, vocab=997)
    found = meter((truth, truth.float(), targets)).distribution()
    assert 0 <= found.kl_mean < 1e-12
    assert 0 <= found.kl_max < 1e-12


def test_a_nan_logit_shows_in_every_figure_that_a_verdict_uses() -> None:
    broken, whole = text(4, 3), text(4, 3)
    broken[1][2, 5] = math.nan
    for texts in ((broken, whole), (whole, broken)):
        found = meter(*texts)
        logits = over_floor(found.distance, Distance())
        figures = (logits.rms_error, logits.max_abs_error, logits.ratio)
        assert all(map(math.isnan, (*figures, found.distribution().kl_max, found.distribution().kl_mean)))


def test_logits_hold_the_candidate_against_the_noise_floor() -> None:
    truth, candidate, targets = text(5, 2)
    found = over_floor(meter((truth, candidate, targets)).distance, distance((truth.float(), truth)))
    floor = truth.float().double() - truth
    assert found.noise_floor_rms == pytest.approx(floor.square().mean().sqrt().item(), rel=1e-9)
    assert found.noise_floor_max == floor.abs().max()
    assert found.ratio == pytest.approx(found.rms_error / found.noise_floor_rms, rel=1e-12)
