"""The verdict in a word: PASS, FAIL if the candidate claims to be the same, else DIFFERENT; and when there is none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minigpt
from minigpt.judge.contest import claims_layer_norm
from minigpt.judge.reference import Reference

PROMPTS = [[5, 17, 42, 8, 23, 11], [3, 60, 1]]


def judge(folder: Path, **how: Any) -> minigpt.ParityReport:
    return minigpt.parity(folder, **{"device": "cpu", "prompts": PROMPTS, "max_new_tokens": 4} | how)


class Louder(minigpt.LayerNorm):
    """A LayerNorm that is wrong."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.01


class MyRMSNorm(nn.Module):
    """Somebody's RMSNorm, with a shift."""

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight + self.bias


@pytest.mark.parametrize(
    ("how", "outcome"),
    [
        ({"norm": "textbook"}, "PASS"),
        ({"norm": Louder}, "FAIL"),
        ({"norm": "rms"}, "DIFFERENT"),
        ({"norm": MyRMSNorm}, "DIFFERENT"),
        ({"quantize": "int8"}, "DIFFERENT"),
        ({"norm": "rms", "budget": "kl=1e-9"}, "FAIL"),
        ({"norm": "rms", "budget": "kl=100"}, "PASS"),
    ],
    ids=str,
)
def test_the_outcome(folder: Path, how: dict[str, Any], outcome: str) -> None:
    report = judge(folder, **how)
    assert report.outcome == outcome
    assert report.to_dict()["verdict"] == ("pass" if outcome == "PASS" else "fail")
    assert bool(report.reasons) is (outcome != "PASS")


@pytest.mark.parametrize(
    ("norm", "claims"),
    [
        (lambda: nn.LayerNorm(8), True),
        (lambda: minigpt.norms.build("fused", 8), True),
        (lambda: minigpt.norms.build("textbook", 8), True),
        (lambda: Louder(8), True),
        (lambda: minigpt.norms.build("rms", 8), False),
        (lambda: minigpt.norms.build("dyt", 8), False),
        (lambda: minigpt.norms.build(MyRMSNorm, 8), False),
        (lambda: nn.RMSNorm(8), False),
    ],
)
def test_what_claims_to_be_a_layer_norm(norm: Callable[[], nn.Module], claims: bool) -> None:
    assert claims_layer_norm(norm()) is claims


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_reference_far_from_its_own_float64_cannot_judge(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """As when a version of transformers ignores an option of the config in one kind of attention."""
    wrong_by = {"float32": 1.002, "bfloat16": 1.2}[dtype]

    class Broken(Reference):
        def __call__(self, input_ids: Tensor) -> Tensor:
            logits = super().__call__(input_ids)
            return logits if logits.dtype == torch.float64 else logits * wrong_by

    monkeypatch.setattr("minigpt.judge.contest.Reference", Broken)
    with pytest.raises(minigpt.MiniGPTError, match=f"^transformers at {dtype} is .* from itself in float64"):
        judge(folder, dtype=dtype)
