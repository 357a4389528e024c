"""The verdict, on reports made by hand, and the report as JSON."""

import dataclasses
import json
import math
from typing import Any

import pytest
from checkpoints import reference, saved

import minigpt
from minigpt.judge.parity_report import Divergence, Logits

ABOVE_2 = math.nextafter(2, 3)


@pytest.fixture(scope="module")
def passing(tmp_path_factory: pytest.TempPathFactory) -> minigpt.ParityReport:
    """A real report, whose figures the tests replace."""
    place = saved(reference(std=0.3, n_layer=1), tmp_path_factory.mktemp("tiny"))
    return minigpt.parity(place, device="cpu", prompts=[[5, 17, 42]], max_new_tokens=4)


def with_logits(report: minigpt.ParityReport, rms_error: float, noise_floor_rms: float) -> minigpt.ParityReport:
    logits = Logits(
        max_abs_error=1.0, rms_error=rms_error, scale=1.0, noise_floor_max=1.0, noise_floor_rms=noise_floor_rms
    )
    return dataclasses.replace(report, logits=logits)


def with_divergence(report: minigpt.ParityReport, margin: float, noise: float) -> minigpt.ParityReport:
    parting = Divergence(prompt=3, token=17, candidate_id=4, reference_id=5, margin=margin, noise=noise)
    return dataclasses.replace(report, greedy=dataclasses.replace(report.greedy, first_divergence=parting))


def judged(report: minigpt.ParityReport) -> bool:
    """The verdict, in which ``passed``, the reasons and the JSON agree; each reason is a sentence with numbers."""
    fields = report.to_dict()
    assert fields["verdict"] == ("pass" if report.passed else "fail")
    assert fields["reasons"] == report.reasons
    assert bool(report.reasons) is not report.passed
    for reason in report.reasons:
        assert reason[0].isupper(), reason
        assert reason.endswith("."), reason
        assert "\n" not in reason, reason
    return report.passed


@pytest.mark.parametrize(
    ("rms_error", "noise_floor", "passes"),
    [
        (0.0, 1e-6, True),
        (1e-6, 1e-6, True),
        (2e-6, 1e-6, True),  # exactly twice
        (2.0, 1.0, True),
        (ABOVE_2, 1.0, False),
        (2.0001, 1.0, False),
        (1e6, 1.0, False),
        (0.0, 0.0, True),
        (math.inf, 1.0, False),
        (math.nan, 1.0, False),
        (1.0, math.nan, False),
        (math.nan, math.nan, False),
        (math.inf, math.inf, False),
        (math.nan, 0.0, False),
    ],
)
def test_at_most_twice_the_noise_floor(
    passing: minigpt.ParityReport, rms_error: float, noise_floor: float, passes: bool
) -> None:
    report = with_logits(passing, rms_error, noise_floor)
    assert judged(report) is passes, report.reasons
    json.dumps(report.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    ("margin", "noise", "passes"),
    [
        (0.0, 0.0, True),
        (0.5, 1.0, True),
        (1.0, 1.0, True),  # exactly as close as the noise
        (math.nextafter(1, 2), 1.0, False),
        (1e-9, 0.0, False),
        (3.0, 1.0, False),
        (math.nan, 1.0, False),
        (1.0, math.nan, False),
        (math.inf, 1.0, False),
    ],
)
def test_greedy_tokens_may_part_only_within_the_noise(
    passing: minigpt.ParityReport, margin: float, noise: float, passes: bool
) -> None:
    report = with_divergence(passing, margin, noise)
    assert judged(report) is passes, report.reasons
    parting = report.to_dict()["greedy"]["first_divergence"]
    assert parting["margin"] == (margin if math.isfinite(margin) else None)
    assert {"prompt": 3, "token": 17, "candidate_id": 4, "reference_id": 5}.items() <= parting.items()
    json.dumps(report.to_dict(), allow_nan=False)


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
    "speed": {"candidate_ms": float, "reference_ms": float},
}  # fmt: skip


def fits(value: Any, wanted: Any) -> bool:
    """Whether a JSON value is what the contract says; a bool is no int, and an int no float."""
    if isinstance(wanted, tuple):
        return any(fits(value, one) for one in wanted)
    if isinstance(wanted, dict):
        return isinstance(value, dict) and all(key in value and fits(value[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return isinstance(value, list) and len(value) > 0 and all(fits(item, wanted[0]) for item in value)
    return value is None if wanted is None else type(value) is wanted


@pytest.mark.parametrize("fails", [False, True])
def test_the_json_is_the_contracts(passing: minigpt.ParityReport, fails: bool) -> None:
    report = with_divergence(with_logits(passing, 5.0, 1.0), 1.0, 0.5) if fails else passing
    fields = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    wanted = CONTRACT if fails else CONTRACT | {"reasons": list}
    unfit = [key for key in wanted if not fits(fields.get(key), wanted[key])]
    assert not unfit, {key: fields.get(key) for key in unfit}
    assert fields == report.to_dict(), "to_dict holds something that JSON does not"
    assert "TF32 off" in fields["versions"]["float32_products"]
