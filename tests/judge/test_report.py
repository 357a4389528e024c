"""The verdict and the budget, on reports made by hand; the word for the verdict; and the report as JSON."""

import dataclasses
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import noisy, reference, saved
from judgements import judge
from norm_classes import Louder
from reports import made, sample_report
from torch import Tensor, nn

import minigpt
from minigpt.judge.verdict import QUANTITIES, decide, parse_budget
from minigpt.report.fields import Causes, Divergence, text_file
from minigpt.report.noise import noise_ratio
from minigpt.report.parity_report import ParityReport

MADE = made(sample_report(2))


@pytest.mark.parametrize(
    ("rms_error", "noise_floor", "passes"),
    [
        (0.0, 1e-6, True),
        (2.0, 1.0, True),  # exactly twice
        (math.nextafter(2, 3), 1.0, False),
        (0.0, 0.0, True),
        (math.inf, 1.0, False),
        (math.nan, 1.0, False),
        (1.0, math.nan, False),
        (math.inf, math.inf, False),
        (math.nan, 0.0, False),
    ],
)
def test_at_most_twice_the_noise_floor(rms_error: float, noise_floor: float, passes: bool) -> None:
    ratio = noise_ratio(rms_error, noise_floor, 1.0)
    verdict_is(passes, replace(MADE, logits=replace(MADE.logits, rms_error=rms_error, ratio=ratio)))
    verdict_is(
        noise_ratio(rms_error, noise_floor, 1.0) <= 4,
        replace(MADE, decoding=replace(MADE.decoding, rms_error=rms_error, ratio=ratio)),
    )


@pytest.mark.parametrize(("within_noise"), [True, False])
def test_greedy_tokens_may_part_only_within_the_noise(within_noise: bool) -> None:
    parting = Divergence(3, 17, candidate_id=4, reference_id=5, margin=0.5, noise=1.0, within_noise=within_noise)
    verdict_is(within_noise, replace(MADE, greedy=replace(MADE.greedy, first_divergence=parting)))


def verdict_is(passes: bool, measured: ParityReport) -> None:
    """The verdict, and reasons that are sentences; in the JSON too."""
    report = ParityReport.of(measured, decide(measured, {}), Causes())
    assert report.passed is passes, report.reasons
    written = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert written["verdict"] == ("pass" if passes else "fail")
    assert bool(report.reasons) is not passes
    assert written["reasons"] == report.reasons == [reason.strip() for reason in report.reasons]
    assert all(reason[0].isupper() and reason.endswith(".") for reason in report.reasons)


# Budgets


def test_limits_are_numbers_or_percent() -> None:
    assert parse_budget("kl=1e-6, perplexity = 0.01%,top1=0") == {"kl": 1e-6, "perplexity": 1e-4, "top1": 0.0}


@pytest.mark.parametrize(
    "text",
    ["", "kl", "kl=", "=1", "kl=1,,", "kl=1,kl=2", "speed=1", "kl=-1", "kl=inf", "kl=nan", "kl=1%%", "KL=1",
     "top1=99%", "top5=0.5"],
)  # fmt: skip
def test_what_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(minigpt.ConfigError, match="in the budget; "):
        parse_budget(text)


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_a_limit_is_kept_up_to_itself(quantity: str) -> None:
    wrong = made(sample_report(2, passing=False))
    measured = QUANTITIES[quantity](wrong)
    for limit, kept in ((measured, True), (math.nextafter(measured, math.inf), True), (measured / 2, False)):
        report = decide(wrong, {quantity: limit})
        text = "the prompts" if quantity in ("rms", "max", "ratio") else text_file(wrong) or "the prompts"
        assert [dataclasses.asdict(line) for line in report.budget or ()] == [
            {"quantity": quantity, "limit": limit, "measured": measured, "kept": kept, "text": text}
        ]
        assert report.passed is kept
        assert report.reasons == [] or f"on {text}." in report.reasons[0]


@pytest.mark.parametrize("decoded", [7.0, math.nan])
def test_errors_of_the_logits_are_those_as_decoded_where_they_are_larger(decoded: float) -> None:
    errors = replace(MADE.logits, rms_error=decoded, ratio=3 * decoded, max_abs_error=math.inf)
    worse = replace(MADE, decoding=errors)
    for quantity, expected in {"rms": decoded, "ratio": 3 * decoded, "max": math.inf}.items():
        assert QUANTITIES[quantity](worse) == pytest.approx(expected, nan_ok=True)
    better = replace(MADE, decoding=replace(MADE.logits, rms_error=0.0))
    assert QUANTITIES["rms"](better) == MADE.logits.rms_error


def test_what_is_not_a_number_is_never_kept() -> None:
    broken = replace(MADE, distribution=replace(MADE.distribution, kl_mean=math.nan))
    assert not decide(broken, {"kl": 1e9}).passed


# PASS, FAIL, DIFFERENT


class MyRMSNorm(nn.Module):
    """Somebody's RMSNorm, with a shift."""

    exact = False

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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_reference_far_from_its_own_float64_cannot_judge(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(minigpt.MiniGPTError, match=f"^transformers at {dtype} is .* from itself in float64"):
        judge(saved(noisy(dtype), tmp_path), dtype=dtype)


# JSON

# What ``minigpt parity --json`` promises. A type stands for a value of it, a list for a list of such, and a tuple for
# any one of several. More keys may follow.
CONTRACT = {
    "model": str, "norm": str, "sites": [str], "device": str, "dtype": str, "attention": str, "versions": dict,
    "verdict": str, "reasons": [str],
    "bitwise": {"equal": bool, "max_abs_error": float},
    "logits": {"max_abs_error": float, "rms_error": float, "scale": float, "noise_floor_max": float,
               "noise_floor_rms": float, "ratio": float},
    "distribution": {"top1_agreement": float, "kl_mean": float, "kl_max": float, "perplexity_reference": float,
                     "perplexity_candidate": float},
    "greedy": {"tokens_compared": int, "first_divergence": (None, {"prompt": int, "token": int})},
    "norm_sites": [{"site": str, "local_error": float, "propagated_error": float, "swapped": bool}],
}  # fmt: skip


def fits(value: Any, expected: Any) -> bool:
    """Whether a JSON value is what the contract says; a bool is no int, and an int no float."""
    if isinstance(expected, tuple):
        return any(fits(value, one) for one in expected)
    if isinstance(expected, dict):
        return isinstance(value, dict) and all(key in value and fits(value[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return isinstance(value, list) and len(value) > 0 and all(fits(item, expected[0]) for item in value)
    return value is None if expected is None else type(value) is expected


@pytest.mark.parametrize("norm", ["textbook", Louder])
def test_the_json_is_the_contracts(tmp_path: Path, norm: Any) -> None:
    report = judge(saved(reference(std=0.3, n_layer=1), tmp_path), norm=norm, max_new_tokens=12)
    written = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    expected = CONTRACT | ({"reasons": list} if report.passed else {})
    unfit = [key for key in expected if not fits(written.get(key), expected[key])]
    assert not unfit, {key: written.get(key) for key in unfit}
    assert written == report.to_dict(), "to_dict holds something that JSON does not"
    assert "TF32 off" in written["versions"]["float32_products"]
