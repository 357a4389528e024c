"""Budgets: what can be written, what is refused, and that exactly the limit is kept."""

import dataclasses
import math

import pytest

import minigpt
from minigpt.judge.budget import QUANTITIES, parse_budget, spend
from minigpt.judge.parity_report import BudgetLine


@pytest.fixture(scope="module")
def report() -> minigpt.ParityReport:
    return minigpt.parity(
        "demo", norm="rms", sites="ln_f", prompts=["Once upon a time"], max_new_tokens=0, device="cpu"
    )


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
def test_a_limit_is_kept_up_to_itself(report: minigpt.ParityReport, quantity: str) -> None:
    measured = QUANTITIES[quantity](report)
    for limit, kept in ((measured, True), (math.nextafter(measured, math.inf), True), (measured / 2, measured == 0)):
        (line,) = spend(report, {quantity: limit})
        assert (line.quantity, line.measured, line.kept) == (quantity, measured, kept)
        judged = dataclasses.replace(report, budget=[line])
        assert judged.passed is kept
        assert judged.reasons == [] or quantity in judged.reasons[0]


@pytest.mark.parametrize("decoded", [7.0, math.nan])
def test_errors_of_the_logits_are_those_as_decoded_where_they_are_larger(
    report: minigpt.ParityReport, decoded: float
) -> None:
    logits = dataclasses.replace(report.logits, rms_error=decoded * report.logits.rms_error, max_abs_error=math.inf)
    worse = dataclasses.replace(report, decoding=logits)
    for quantity, wanted in {"rms": logits.rms_error, "ratio": logits.ratio, "max": math.inf}.items():
        assert QUANTITIES[quantity](worse) == pytest.approx(wanted, nan_ok=True)
    better = dataclasses.replace(report, decoding=dataclasses.replace(logits, rms_error=0.0, max_abs_error=0.0))
    assert QUANTITIES["rms"](better) == report.logits.rms_error


def test_what_is_not_a_number_is_never_kept(report: minigpt.ParityReport) -> None:
    assert not BudgetLine("kl", 1e9, math.nan).kept
    broken = dataclasses.replace(report, budget=[BudgetLine("kl", 1e9, math.nan)])
    assert not broken.passed
