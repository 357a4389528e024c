"""Ordinary differences, each recomputed from the two models that it lies between."""

from pathlib import Path

import pytest
import torch

import minigpt

PROMPT = [3, 60, 1, 9]


@pytest.fixture(scope="module")
def report(folder: Path) -> minigpt.ParityReport:
    return minigpt.parity(
        folder, norm="textbook", prompts=[PROMPT, [1, 2, 3, 4, 5]], max_new_tokens=1, noise=True, device="cpu"
    )


@torch.inference_mode()
def logits(folder: Path, **how: str) -> torch.Tensor:
    return minigpt.from_pretrained(folder, device="cpu", **how)(torch.tensor([PROMPT])).double()


def rms(difference: torch.Tensor) -> float:
    return difference.square().mean().sqrt().item()


def test_the_differences_that_a_cpu_can_show_are_there(report: minigpt.ParityReport) -> None:
    assert report.noise is not None
    assert [ordinary.difference for ordinary in report.noise] == [
        "eager against sdpa", "bfloat16 against float32", "float16 against float32", "batch of 1 against batch of 8",
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_narrower_dtype_differs_as_the_two_models_do(folder: Path, report: minigpt.ParityReport, dtype: str) -> None:
    (found,) = [ordinary for ordinary in report.noise or [] if ordinary.difference.startswith(dtype)]
    expected = rms(logits(folder, dtype=dtype) - logits(folder))
    print(f"{found.rms_error:.6g}, recomputed {expected:.6g}, scale {rms(logits(folder)):.3g}")
    assert found.rms_error == pytest.approx(expected, rel=1e-6)


def test_the_share_is_of_the_candidates_error_on_the_same_prompt(folder: Path, report: minigpt.ParityReport) -> None:
    truth = logits(folder, dtype="float64")
    error = rms(logits(folder, norm="textbook") - truth)
    for ordinary in report.noise or []:
        if ordinary.rms_error:
            assert ordinary.share == pytest.approx(error / ordinary.rms_error, rel=0.05), ordinary
        else:
            assert ordinary.share is None
