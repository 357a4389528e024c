"""Every mistake is named, and a correct norm is never blamed for one."""

import pytest
import sabotages
import torch
from torch import nn

from minigpt.conformance import ConformanceReport, check_norm
from minigpt.conformance.diagnosis import BATCH, wrong_formula
from minigpt.conformance.subject import Subject
from minigpt.device import DTYPES

# torch.compile would trace the shape checks, and some norms here return other shapes on purpose
pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("unchecked")]

FAST = ["widths", "values", "special", "layouts", "behaviour", "gradients"]
HALVES = [f"statistics are kept in {dtype} for {dtype} input" for dtype in ("bfloat16", "float16")]
MISPLACED = "normalizes over the wrong dimension: over the sequence of a (batch, sequence, width) input"

# A norm, and how each of its diagnoses begins
MISTAKES: list[tuple[type[nn.Module], list[str]]] = [
    (sabotages.Eps1e6, ["eps looks like 1e-06, not 1e-05", "the eps it is given is ignored"]),
    (sabotages.EpsIgnored, ["the eps it is given is ignored"]),
    (sabotages.NoEps, ["eps is left out", "the eps it is given is ignored"]),
    (sabotages.StdPlusEps, ["eps is added to the deviation, not to the variance"]),
    (sabotages.DividesByNMinusOne, ["variance divides by n - 1"]),
    (sabotages.FirstAttempt, ["variance divides by n - 1", "eps is added to the deviation", *HALVES]),
    (sabotages.VarianceForDeviation, ["it divides by the variance: a square root is missing"]),
    (sabotages.ConstantDeviation, ["it does not divide by the row's own deviation"]),
    (sabotages.NoMean, ["the mean is not subtracted (it is an RMSNorm)"]),
    (sabotages.HalfTheMean, ["the mean is not subtracted"]),
    (sabotages.DynamicTanh, ["each value is computed by itself", "it returns finite numbers where torch's layer_norm"]),
    (sabotages.NoShift, ["the shift is ignored"]),
    (sabotages.Exchanged, ["scale and shift are exchanged"]),
    (sabotages.ScaleAddedToOne, ["it multiplies by 1 + scale"]),
    (sabotages.TwiceTheShift, ["scale and shift are applied otherwise"]),
    (sabotages.BFloat16Throughout, ["statistics are kept in half precision, or in as few bits"]),
    (sabotages.RoundedToBFloat16, ["its result is rounded to bfloat16"]),
    (sabotages.StatisticsOfTheInput, HALVES),
    (sabotages.DetachedStatisticsOfTheInput, [*HALVES, "gradients are wrong though values are right"]),
    (sabotages.NoSingleTokens, [*HALVES, "wrong only for one token, decoding input", BATCH]),
    (sabotages.Float32Throughout, ["wrong only for float64 input"]),
    (sabotages.LouderInBfloat16, ["wrong only for bfloat16 input"]),
    (sabotages.DifferenceOfSquares, ["wrong only for mean far from 0, where a difference of squares"]),
    (sabotages.OverTheSequence, [MISPLACED]),
    (sabotages.OneVarianceForAll, [BATCH]),
    (sabotages.LooksAtItsBatch, ["wrong only for one token input", BATCH]),
    (sabotages.ZeroForConstantRows, ["wrong only for constant rows"]),
    (sabotages.NaNForAnyRow, ["it returns NaN or infinities for ordinary rows"]),
    (sabotages.HidesNaN, ["it returns finite numbers where torch's layer_norm returns NaN"]),
    (sabotages.MultiplesOfFourOnly, ["wrong only at width 2, 3, 127, 1001"]),
    (sabotages.IgnoresStrides, ["wrong only for non-contiguous input: transposed, every second column"]),
    (sabotages.WrongInDecoding, ["wrong only for decoding input", BATCH]),
    (sabotages.WrongInTraining, ["its values depend on training mode"]),
    (sabotages.WrongForInference, ["its values depend on training mode"]),
    (sabotages.WrongSum, ["wrong only where it adds the residual too, in add_norm"]),
    (sabotages.OtherSumInTraining, ["wrong only where it adds the residual too, in add_norm"]),
    (sabotages.DetachedMean, ["gradients are wrong though values are right"]),
    (sabotages.WrongGradientsOfTokens, ["gradients are wrong though values are right, in as tokens"]),
    (sabotages.Draws, ["it answers differently from call to call"]),
    (sabotages.WritesOverItsOutput, ["its next call writes over its output"]),
    (sabotages.KeepsItsWeights, ["it keeps its weights"]),
    (
        sabotages.ModifiesItsInput,
        ["it modifies its input", "ModifiesItsInput, given (12, 64) in float32, raised "],
    ),
    (sabotages.ReturnsFloat32, ["ReturnsFloat32 changes the dtype: torch.float16 went in, torch.float32 came out"]),
    (sabotages.RowsOnly, ["RowsOnly, given (3, 4, 64) in bfloat16, raised ValueError: rows, please"]),
    (sabotages.NoHalf, ["NoHalf, given (33, 2) in float16, raised RuntimeError: no kernel for float16"]),
    (sabotages.NoHalfWeights, ["NoHalfWeights, given (33, 2) in float16, raised RuntimeError: "]),
    (sabotages.EpsTwice, ["no mistake known by name; the first case that fails is 'width 2'"]),
]


def check(norm: object, cases: str | list[str]) -> ConformanceReport:
    return check_norm(norm, device="cpu", cases=cases, compile_backend="aot_eager")  # pyright: ignore


@pytest.mark.parametrize(("norm", "expected"), MISTAKES, ids=[norm.__name__ for norm, _ in MISTAKES])
def test_a_mistake_fails_and_is_named_and_nothing_else_is(norm: type[nn.Module], expected: list[str]) -> None:
    report = check(norm, FAST)
    assert not report.passed
    assert len(report.diagnoses) == len(expected), report.diagnoses
    for said, start in zip(report.diagnoses, expected, strict=True):
        assert said.startswith(start), report.diagnoses


def test_rows_beyond_the_grid_are_named() -> None:
    report = check(sabotages.Only65535Rows, ["float32, ordinary rows", "rows"])
    assert report.diagnoses == ["wrong only for 65,536 rows, 65,537 rows"]


def test_what_differs_under_torch_compile_is_named() -> None:
    assert check(sabotages.WrongWhenCompiled, "compile").diagnoses == ["it differs under torch.compile"]


def test_what_cannot_be_compiled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(module: nn.Module, **settings: object) -> None:
        raise RuntimeError("no such backend")

    monkeypatch.setattr(torch, "compile", refuse)
    (said,) = check("fused", "compile").diagnoses
    assert said.startswith("it raises RuntimeError: no such backend"), said


def test_the_judgement_says_at_which_dtypes_it_is_wrong() -> None:
    report = check(sabotages.StatisticsOfTheInput, ["widths", "values", "layouts"])
    assert str(report).startswith("StatisticsOfTheInput is not a LayerNorm at bfloat16, float16 on cpu: ")
    assert report.dtypes == {"float32": True, "bfloat16": False, "float16": False, "float64": True}
    assert str(check("textbook", "float32, *")).startswith("textbook is a LayerNorm on cpu: ")


def test_a_norm_that_needs_a_bias_is_judged_with_one() -> None:
    report = check(sabotages.NeedsAShift, ["values", "behaviour", "gradients"])
    assert report.passed, report
    assert report.dtypes == dict.fromkeys(DTYPES, True)
    (case,) = (case for case in report.cases if case.name == "no bias")
    assert case.note.startswith(
        "not judged: without a bias, NeedsAShift, given (12, 64) in float32, raised AttributeError"
    ), case.note


def test_an_output_of_another_shape_is_a_failure() -> None:
    class Shorter(sabotages.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)[..., :1]

    report = check(Shorter, ["widths", "values"])
    assert report.dtypes["float32"] is False
    assert "Shorter must return one tensor of its input's shape (33, 2), got (33, 1) (" in report.diagnoses[0]


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("std_eps", "eps is added to the deviation"),
        ("rms", "the mean is not subtracted"),
        ("dyt", "without the mean and the deviation"),
    ],
)
def test_inexact_registered_norms_are_named_for_what_they_are(name: str, mistake: str) -> None:
    assert mistake in check(name, "float32, *").diagnoses[0]


@pytest.mark.parametrize("norm", ["fused", "textbook", *sabotages.CORRECT])
def test_no_probe_blames_a_correct_norm(norm: type[nn.Module] | str) -> None:
    for seed in range(3):
        assert wrong_formula(Subject(norm, torch.device("cpu"), seed=seed)) == []


def test_a_norm_that_raises_on_every_probe_is_still_diagnosed() -> None:
    class Moody(sabotages.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[-1] != 64:
                raise RuntimeError("64 only")
            return sabotages.exact(self, x)

    (said,) = check(Moody, "width*").diagnoses
    assert " raised RuntimeError: 64 only" in said
