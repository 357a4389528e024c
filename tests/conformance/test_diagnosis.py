"""Every mistake is named, and a correct norm is never blamed for one."""

import pytest
import sabotages
import torch
from torch import nn

from minigpt.conformance import ConformanceReport, check_norm
from minigpt.conformance.mistakes import BATCH, Probe, wrong_formula
from minigpt.conformance.subject import Subject
from minigpt.placement import DTYPES

# torch.compile would trace the shape checks, and some norms here return other shapes on purpose
pytestmark = pytest.mark.usefixtures("unchecked")

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
    (sabotages.SampleStdPlusEps, ["variance divides by n - 1", "eps is added to the deviation"]),
    (sabotages.FirstAttempt, ["variance divides by n - 1", "eps is added to the deviation", *HALVES]),
    (sabotages.HalfTheVariance, ["variance is 0.5 times what it should be"]),
    (sabotages.VarianceForDeviation, ["it divides by the variance: a square root is missing"]),
    (sabotages.ConstantDeviation, ["it does not divide by the row's own deviation"]),
    (sabotages.NoMean, ["the mean is not subtracted (it is an RMSNorm)"]),
    (sabotages.HalfTheMean, ["the mean is not subtracted"]),
    (sabotages.DynamicTanh, ["each value is computed by itself", "it returns finite numbers where torch's layer_norm"]),
    (sabotages.NoShift, ["the shift is ignored"]),
    (sabotages.NoScale, ["the scale is ignored"]),
    (sabotages.Exchanged, ["scale and shift are applied otherwise"]),
    (sabotages.ScaleAddedToOne, ["scale and shift are applied otherwise"]),
    (sabotages.TwiceTheShift, ["scale and shift are applied otherwise"]),
    (sabotages.Float16Throughout, ["statistics are kept in float16, or in as few bits"]),
    (sabotages.Float16Variance, ["statistics are kept in float16, or in as few bits"]),
    (sabotages.BFloat16Throughout, ["statistics are kept in bfloat16, or in as few bits"]),
    (sabotages.StatisticsOfTheInput, HALVES),
    (sabotages.DetachedStatisticsOfTheInput, [*HALVES, "gradients are wrong though values are right"]),
    (sabotages.NoSingleTokens, [*HALVES, "wrong only for one token, decoding input", BATCH]),
    (sabotages.Float32Throughout, ["wrong only for float64 input"]),
    (sabotages.LouderInBfloat16, ["wrong only for bfloat16 input"]),
    (sabotages.DifferenceOfSquares, ["variance is a difference of squares"]),
    (sabotages.OverTheSequence, [MISPLACED]),
    (sabotages.OverDimensionOne, [MISPLACED]),
    (sabotages.OneVarianceForAll, [BATCH]),
    (sabotages.LooksAtItsBatch, ["wrong only for one token input", BATCH]),
    (sabotages.ZeroForConstantRows, ["wrong only for constant rows"]),
    (sabotages.NaNForAnyRow, ["it returns NaN for ordinary rows"]),
    (sabotages.HidesNaN, ["it returns finite numbers where torch's layer_norm returns NaN"]),
    (sabotages.MultiplesOfFourOnly, ["wrong only at width 2, 3, 127, 1001"]),
    (sabotages.IgnoresStrides, ["wrong only for non-contiguous input: transposed, every second column"]),
    (sabotages.WrongInDecoding, ["wrong only for decoding input", BATCH]),
    (sabotages.WrongInTraining, ["its values depend on training mode"]),
    (sabotages.WrongForInference, ["its values depend on training mode"]),
    (sabotages.WrongSum, ["wrong only where it adds the residual too, in add_norm"]),
    (sabotages.OtherSumInTraining, ["wrong only where it adds the residual too, in add_norm"]),
    (sabotages.WrongGradients, ["gradients are wrong though values are right"]),
    (sabotages.DetachedMean, ["gradients are wrong though values are right"]),
    (sabotages.WrongGradientsOfTokens, ["gradients are wrong though values are right, in as tokens"]),
    (sabotages.Draws, ["it answers differently from call to call"]),
    (sabotages.RemembersStatistics, ["it answers differently from call to call"]),
    (sabotages.WritesOverItsOutput, ["its next call writes over its output"]),
    (sabotages.KeepsItsWeights, ["it keeps its weights"]),
    (sabotages.ModifiesItsInput, ["it modifies its input", "ModifiesItsInput raised RuntimeError"]),
    (sabotages.ReturnsFloat32, ["ReturnsFloat32 changes the dtype: torch.float16 went in, torch.float32 came out"]),
    (sabotages.RowsOnly, ["RowsOnly raised ValueError: rows, please, and not (3, 4, 64)"]),
    (sabotages.NoHalf, ["NoHalf raised RuntimeError: no kernel for float16"]),
    (sabotages.NoHalfWeights, ["NoHalfWeights raised RuntimeError: "]),
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


def test_the_judgement_says_if_only_half_precision_is_wrong() -> None:
    report = check(sabotages.StatisticsOfTheInput, ["widths", "values", "layouts"])
    assert str(report).startswith("StatisticsOfTheInput is not a LayerNorm in half precision on cpu: ")
    assert report.dtypes == {"float32": True, "bfloat16": False, "float16": False, "float64": True}
    for norm in (sabotages.NoSingleTokens, sabotages.Float32Throughout, sabotages.DividesByNMinusOne):
        assert " is not a LayerNorm on cpu: " in str(check(norm, ["widths", "values", "layouts"])), norm
    assert str(check("textbook", "float32, *")).startswith("textbook is a LayerNorm on cpu: ")


def test_a_norm_that_needs_a_bias_is_judged_with_one() -> None:
    report = check(sabotages.NeedsAShift, ["values", "behaviour", "gradients"])
    assert report.passed, report
    assert report.dtypes == dict.fromkeys(DTYPES, True)
    (case,) = (case for case in report.cases if case.name == "no bias")
    assert case.note.startswith("not judged: without a bias, NeedsAShift raised AttributeError"), case.note


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
        assert wrong_formula(Probe(Subject(norm, torch.device("cpu"), seed=seed))) == []


def test_a_norm_that_raises_on_every_probe_is_still_diagnosed() -> None:
    class Moody(sabotages.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[-1] != 64:
                raise RuntimeError("64 only")
            return sabotages.exact(self, x)

    (said,) = check(Moody, "width*").diagnoses
    assert " raised RuntimeError: 64 only" in said


class AffineAfterTheCast(sabotages.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        standard = torch.nn.functional.layer_norm(wide, wide.shape[-1:], eps=self.eps)
        return standard.to(x.dtype) * self.weight + self.bias


def test_a_norm_that_scales_after_the_cast_passes_with_a_remark() -> None:
    report = check(AffineAfterTheCast, ["values", "widths"])
    assert report.passed
    assert [
        note for note in report.notes if note.startswith("In bfloat16 and float16, scale and shift are applied after")
    ]
    for norm in ("fused", "textbook"):
        assert check(norm, "float32, *").notes == []
