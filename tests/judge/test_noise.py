"""Ordinary differences, each recomputed from the two models that it lies between."""

from pathlib import Path

import pytest
import torch

import minigpt

PROMPT = [3, 60, 1, 9]


@torch.inference_mode()
def test_each_difference_is_that_of_two_models_and_the_share_is_the_candidates_error_over_it(folder: Path) -> None:
    def logits(**how: str) -> torch.Tensor:
        return minigpt.from_pretrained(folder, device="cpu", **how)(torch.tensor([PROMPT])).double()

    def rms(one: torch.Tensor, other: torch.Tensor) -> float:
        return (one - other).square().mean().sqrt().item()

    report = minigpt.parity(
        folder, norm="textbook", prompts=[PROMPT, [1, 2, 3, 4, 5]], max_new_tokens=1, noise=True, device="cpu"
    )
    found = {ordinary.difference: ordinary for ordinary in report.noise}
    assert [*found] == [
        "eager against sdpa", "bfloat16 against float32", "float16 against float32", "batch of 1 against batch of 8",
    ]  # fmt: skip
    for dtype in ("bfloat16", "float16"):
        expected = rms(logits(dtype=dtype), logits())
        assert found[f"{dtype} against float32"].rms_error == pytest.approx(expected, rel=1e-6)
    error = rms(logits(norm="textbook"), logits(dtype="float64"))
    for ordinary in report.noise:
        share = pytest.approx(error / ordinary.rms_error, rel=0.05) if ordinary.rms_error else None
        assert ordinary.share == share, ordinary
