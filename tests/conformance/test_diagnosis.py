"""Every mistake is named, and a correct norm is never blamed for one."""

import pytest
import sabotages
import torch
from torch import nn

from minigpt.conformance import ConformanceReport, check_norm
from minigpt.conformance.case import Subject
from minigpt.conformance.diagnosis import wrong_formula
from minigpt.device import DTYPES

# torch.compile would trace the shape checks, and some norms here return other shapes on purpose
pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("unchecked")]

SIZES = ["width 2", "width 64", "width 1025", "257 rows", "65,537 rows", "batch of 257", "sequence of 1,025"]
FAST = [*SIZES, "values", "special", "layouts", "behaviour", "gradients, [!0-9wbs]*", "gradients, bfloat16",
        "gradients, width 1025", "gradients, 1,025 rows"]  # fmt: skip


def check(norm: object, cases: str | list[str]) -> ConformanceReport:
    return check_norm(norm, device="cpu", cases=cases, compile_backend="aot_eager")  # pyright: ignore


@pytest.mark.parametrize(
    ("norm", "expected"), sabotages.MISTAKES.items(), ids=lambda norm: getattr(norm, "__name__", "")
)
def test_a_mistake_fails_and_is_named_and_nothing_else_is(norm: type[nn.Module], expected: tuple[str, ...]) -> None:
    report = check(norm, "compile" if norm is sabotages.WrongWhenCompiled else FAST)
    assert not report.passed
    assert len(report.diagnoses) >= len(expected), report.diagnoses
    for said, start in zip(report.diagnoses, expected, strict=False):
        assert said.startswith(start), report.diagnoses


def test_what_cannot_be_compiled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(module: nn.Module, **settings: object) -> None:
        raise RuntimeError("no such backend")

    monkeypatch.setattr(torch, "compile", refuse)
    (said,) = check("fused", "compile").diagnoses
    assert said.startswith("it raises RuntimeError: no such backend"), said


def test_the_judgement_says_at_which_dtypes_it_is_wrong() -> None:
    report = check(sabotages.StatisticsOfTheInput, ["width 64", "values", "layouts"])
    assert str(report).startswith("StatisticsOfTheInput is not a LayerNorm at bfloat16, float16 on cpu: ")
    assert report.dtypes == {"float32": True, "bfloat16": False, "float16": False, "float64": True}


def test_a_norm_that_needs_a_bias_is_judged_with_one() -> None:
    report = check(sabotages.NeedsAShift, ["values", "behaviour", "gradients, bfloat16"])
    assert report.passed, report
    assert report.dtypes == dict.fromkeys(DTYPES, True)
    (case,) = (case for case in report.cases if case.name == "no bias")
    assert "a shift, please" in case.refused["float32"]


def test_an_output_of_another_shape_is_a_failure() -> None:
    class Shorter(sabotages.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)[..., :1] if x.shape[-1] == 2 else super().forward(x)

    report = check(Shorter, ["width 2", "values"])
    assert report.dtypes["float32"] is False
    assert "Shorter must return one tensor of its input's shape (33, 2), got (33, 1) (" in report.diagnoses[0]


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("std_eps", "eps is added to the deviation"),
        ("rms", "the mean is not subtracted"),
        ("dyt", "without the mean and the deviation"),
        ("no_scale", "it does not divide by the row's own deviation"),
        ("no_affine", "scale and shift are ignored"),
        ("detached", "the statistics are detached"),
    ],
)
def test_inexact_registered_norms_are_named_for_what_they_are(name: str, mistake: str) -> None:
    assert mistake in " ".join(check(name, ["float32, *", "gradients, ordinary rows"]).diagnoses)


@pytest.mark.parametrize("norm", ["fused", "textbook", *sabotages.CORRECT])
def test_no_probe_blames_a_correct_norm(norm: type[nn.Module] | str) -> None:
    for seed in range(3):
        assert wrong_formula(Subject(norm, torch.device("cpu"), seed=seed), {*DTYPES}) == []
