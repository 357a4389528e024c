"""Every mistake is named, from outside, and a correct norm is never blamed for one."""

from collections.abc import Callable
from typing import Any

import pytest
import sabotages
import torch
from torch import nn

from minigpt.conformance import ConformanceReport, check_norm
from minigpt.conformance.diagnosis import diagnoses
from minigpt.conformance.mistakes import (
    cancelling_variance,
    ignored_eps,
    narrow_half_statistics,
    narrow_statistics,
    wrong_affine,
    wrong_deviation,
    wrong_dimension,
    wrong_statistics,
)
from minigpt.conformance.probe import Probe
from minigpt.conformance.subject import Subject
from minigpt.placement import DTYPES

# A mistake, the groups of cases or the case that must show it, and what it must be called
MISTAKES = [
    (sabotages.Eps1e6, "*near sqrt(eps)", "eps looks like 1e-06, not 1e-05"),
    (sabotages.Eps1e4, "*near sqrt(eps)", "eps looks like 0.0001, not 1e-05"),
    (sabotages.EpsIgnored, "another eps", "the eps it is given is ignored"),
    (sabotages.NoEps, "*constant rows", "eps is left out"),
    (sabotages.LeastVariance, "*near sqrt(eps)", "eps is the least variance, not added to it"),
    (sabotages.LeastDeviation, "*near sqrt(eps)", "eps is the least deviation, not added to the variance"),
    (sabotages.MeanDeviation, "*ordinary rows", "it divides by something else than the root mean square"),
    (sabotages.AnotherEpsForFloat64, "*near sqrt(eps)", "eps looks like 0.001, not 1e-05, but not for float32 input"),
    (sabotages.OtherwiseInTraining, ["values", "any mode", "gradients*"], "its values depend on training mode"),
    (sabotages.WritesOverItsOutput, "behaviour", "its next call writes over its output"),
    (sabotages.WrongSum, ["values", "behaviour"], "wrong only where it adds the residual too, in add_norm"),
    (sabotages.WrongSum, ["values", "gradients"], "gradients are wanted too, in residual added too"),
    (sabotages.Only4096Rows, "*[0-9] rows", "wrong for 65,535 rows, and right for 1"),
    (sabotages.DividesByNMinusOne, "width*", "variance divides by n - 1"),
    (sabotages.DividesByNPlusOne, "width*", "variance divides by n + 1"),
    (sabotages.StdPlusEps, "*near sqrt(eps)", "eps is added to the deviation"),
    (sabotages.NoShift, "*ordinary rows", "the shift is ignored"),
    (sabotages.NoScale, "*ordinary rows", "the scale is ignored"),
    (sabotages.Exchanged, "*ordinary rows", "scale and shift are exchanged"),
    (sabotages.ScaleAddedToOne, "*ordinary rows", "the scale is added to 1"),
    (sabotages.Float16Throughout, "float32, *", "statistics are kept in float16"),
    (sabotages.Float16Statistics, "float32, *", "statistics are kept in float16"),
    (sabotages.Float16Variance, "float32, *", "statistics are kept in float16"),
    (sabotages.BFloat16Throughout, "float32, *", "statistics are kept in bfloat16"),
    (sabotages.StatisticsOfTheInput, "float16, *", "statistics are kept in float16 for float16 input"),
    (sabotages.StatisticsOfTheInput, "bfloat16, *", "statistics are kept in bfloat16 for bfloat16 input"),
    (sabotages.Float32Throughout, "values", "wrong only for float64 input, which is computed in float32"),
    (sabotages.DifferenceOfSquares, "float32, mean far*", "variance is a difference of squares"),
    (sabotages.OverTheSequence, "?-D input", "normalizes over the wrong dimension: over the sequence"),
    (sabotages.OverDimensionOne, "?-D input", "normalizes over the wrong dimension: over the sequence"),
    (sabotages.NoMean, "*ordinary rows", "the mean is not subtracted (it is an RMSNorm)"),
    (sabotages.DynamicTanh, "*ordinary rows", "each value is computed by itself"),
    (sabotages.ConstantDeviation, "*ordinary rows", "it does not divide by the row's own deviation"),
    (sabotages.ZeroForConstantRows, ["values", "widths"], "wrong only for constant rows"),
    (sabotages.NaNForConstantRows, ["values", "widths"], "wrong only for constant rows"),
    (sabotages.NaNForAnyRow, ["values", "widths", "behaviour"], "it returns NaN for ordinary rows"),
    (sabotages.Only65535Rows, "rows", "wrong only beyond 65,535 rows"),
    (sabotages.WrongWhenCompiled, "compile", "it differs under torch.compile"),
    (sabotages.NoShiftInTraining, "gradients", "values are wrong where gradients are wanted too"),
    (sabotages.NoShiftThatIsFrozen, ["values", "gradients"], "gradients are wanted too, in frozen weight and bias"),
    (sabotages.OtherSumInTraining, ["values", "gradients"], "gradients are wanted too, in residual added too"),
    (sabotages.WrongGradients, "gradients", "gradients are wrong though values are right, most of all of the input"),
    (sabotages.DetachedMean, "gradients", "gradients are wrong though values are right, most of all of the input"),
    (sabotages.ModifiesItsInput, ["values", "behaviour"], "it modifies its input"),
    (sabotages.LooksAtItsBatch, ["values", "behaviour"], "a row depends on its batch"),
    (sabotages.ReturnsFloat32, "float16, *", "changes the dtype: torch.float16 went in, torch.float32 came out"),
    (sabotages.HidesNaN, ["values", "special"], "wrong only where a row holds an infinity or a NaN"),
    (sabotages.MultiplesOfFourOnly, ["values", "widths", "rows"], "wrong only at width 1, 2, 3, 5, 127, 1001"),
    (sabotages.IgnoresStrides, "layouts", "wrong only for non-contiguous input"),
    (sabotages.NoHalf, "float16, *", "no kernel for float16"),
]

# The same, where this is all that may be said of it, at first sight of every kind of case
ALONE = [
    (sabotages.LouderInBfloat16, "wrong only for bfloat16 input"),
    (sabotages.HalfTheVariance, "variance is 0.5 times what it should be"),
    (sabotages.SumOfSquares, "variance is the sum of squares, not their mean"),
    (sabotages.VarianceAboutZero, "the variance is taken about 0, not about the mean"),
    (sabotages.HalfTheMean, "the mean is not removed: a number added to a whole row changes what comes out"),
    (sabotages.NoNorm, "each value is computed by itself: neither the mean nor the deviation of its row enters"),
    (sabotages.VarianceForDeviation, "it divides by the variance: a square root is missing"),
    (sabotages.RootOfTheDeviation, "it divides by the root of the deviation: a square root too many"),
    (sabotages.AnotherPower, "it does not rescale by the row's deviation: four times the row gives another result"),
    (sabotages.SampleStdOverTheSequence, "normalizes over the wrong dimension: over the sequence"),
    (sabotages.EpsOfTheLargest, "eps is left out"),
    (sabotages.OverTheRows, "normalizes over the wrong dimension: over the rows of a 2-D input"),
    (sabotages.LosesTheLastColumn, "the result is no multiple of the centred row"),
    (sabotages.Rounds, "the result is no multiple of the centred row"),
    (sabotages.InParts, "normalizes over the wrong dimension: over 2 parts of a row of 64, each by itself"),
    (sabotages.OneVarianceForAll, "a row depends on its batch"),
    (sabotages.EverySeventhRow, "a row depends on its batch"),
    (sabotages.ApproximateDeviation, "the deviation is approximate, off by some 1e-03 of it"),
    (sabotages.LittleApproximateDeviation, "the deviation is approximate, off by some 4e-06 of it"),
    (sabotages.BlocksOf128, "wrong only at width 1, 2, 3, 5, 64, 127, 1001, 1600"),
    (sabotages.OtherwiseWithoutGradients, "it gives other values without gradients than with them"),
    (sabotages.RowsOnly, "RowsOnly raised ValueError: rows, please, and not (3, 4, 64)"),
    (sabotages.NoHalfWeights, "NoHalfWeights raised RuntimeError: "),
    (sabotages.RemembersStatistics, "it answers differently from call to call"),
    (sabotages.AbsoluteScale, "with scale 1 and shift 0 it is right, but the scale is applied otherwise"),
    (sabotages.TwiceTheShift, "with scale 1 and shift 0 it is right, but the shift is applied otherwise"),
]


def check(norm: object, cases: str | list[str]) -> ConformanceReport:
    return check_norm(norm, device="cpu", cases=cases, compile_backend="aot_eager")  # pyright: ignore


@pytest.mark.usefixtures("unchecked")  # torch.compile would trace the shape checks as well
@pytest.mark.parametrize(("norm", "cases", "name"), MISTAKES, ids=[norm.__name__ for norm, _, _ in MISTAKES])
def test_a_mistake_fails_and_is_named(norm: type[nn.Module], cases: str | list[str], name: str) -> None:
    report = check(norm, cases)
    assert not report.passed
    assert any(name in said for said in report.diagnoses), report
    assert len(report.diagnoses) <= 2, report


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("norm", "said"), ALONE, ids=[norm.__name__ for norm, _ in ALONE])
def test_a_mistake_is_named_and_nothing_else(norm: type[nn.Module], said: str) -> None:
    report = check(norm, ["widths", "values", "layouts", "behaviour", "gradients"])
    assert [one.startswith(said) for one in report.diagnoses] == [True], report


@pytest.mark.usefixtures("unchecked")
def test_what_a_norm_raises_is_told_beside_its_mistakes() -> None:
    said = check(sabotages.NoBfloat16, ["widths", "values", "behaviour"]).diagnoses
    assert said[0] == "statistics are kept in float16 for float16 input", said
    assert said[1].startswith("NoBfloat16 raised TypeError: no such type"), said
    assert len(said) == 2, said


@pytest.mark.parametrize("norm", [sabotages.ClampsItsOutput, sabotages.ClampsItsInput])
def test_what_is_clamped_is_failed_and_blamed_for_nothing_else(norm: type[nn.Module]) -> None:
    report = check(norm, ["values", "behaviour"])
    assert not report.passed
    assert not [said for said in report.diagnoses if "weights" in said and "far from 1" not in said], report
    assert not any("difference of squares" in said for said in report.diagnoses), report


def test_two_mistakes_are_both_named() -> None:
    report = check(sabotages.SampleStdPlusEps, "*near sqrt(eps)")
    assert report.diagnoses == [
        "variance divides by n - 1",
        "eps is added to the deviation, not to the variance",
    ]


def test_narrow_halves_hide_no_other_mistake() -> None:
    halves = [f"statistics are kept in {dtype} for {dtype} input" for dtype in ("float16", "bfloat16")]
    everything = ["widths", "values", "layouts", "behaviour", "gradients"]
    assert check(sabotages.StatisticsOfTheInput, everything).diagnoses == halves
    gradients = "gradients are wrong though values are right, most of all of the input"
    assert check(sabotages.DetachedStatisticsOfTheInput, everything).diagnoses == [*halves, gradients]
    assert check(sabotages.NoSingleTokens, everything).diagnoses == [
        *halves,
        "wrong only for an input of one token",
        "wrong only for a batch of one token each, as decoding has it",
    ]


def test_what_is_wrong_in_halves_alone_is_judged_so() -> None:
    report = check(sabotages.StatisticsOfTheInput, ["widths", "values", "layouts"])
    assert report.judgement == "is not a LayerNorm in half precision"
    assert str(report).startswith("StatisticsOfTheInput is not a LayerNorm in half precision on cpu: ")
    for norm in (sabotages.NoSingleTokens, sabotages.Float32Throughout, sabotages.DividesByNMinusOne):
        assert check(norm, ["widths", "values", "layouts"]).judgement == "is not a LayerNorm", norm
    for norm in (sabotages.HalfBeyondBatches, sabotages.SpeaksOfHalves):
        report = check(norm, ["values", "layouts"])
        assert {case.group for case in report.failures} == {"layouts"}
        assert report.judgement == "is not a LayerNorm", norm
    assert check("textbook", "float32, *").judgement == "is a LayerNorm"


def test_what_is_raised_with_a_bias_too_is_told_once() -> None:
    report = check(sabotages.NeedsFewerRows, ["values", "layouts", "behaviour"])
    assert "no bias" in {case.name for case in report.failures}
    assert [said for said in report.diagnoses if "twelve" in said] == [report.diagnoses[-1]]
    assert report.diagnoses[-1].startswith("NeedsFewerRows raised ValueError: twelve rows")


def test_a_norm_that_needs_a_bias_is_told_so_and_judged_with_one() -> None:
    report = check(sabotages.NeedsAShift, ["values", "behaviour", "gradients"])
    assert report.passed, report
    assert report.dtypes == dict.fromkeys(DTYPES, True)
    (note,) = report.notes
    assert note.startswith("without a bias, NeedsAShift raised AttributeError: 'NoneType' object has no attribute")
    assert note.endswith("; it is judged with a bias")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda y: y.double(), "changes the dtype: torch.float32 went in, torch.float64 came out"),
        (lambda y: y[..., :3], "changes the shape: (33, 5) went in, (33, 3) came out"),
        (lambda y: y.to("meta"), "changes the device: cpu went in, meta came out"),
    ],
)
def test_an_output_unlike_the_input_is_a_failure(change: Callable[[torch.Tensor], torch.Tensor], said: str) -> None:
    class Changes(sabotages.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return change(super().forward(x))

    report = check(Changes, ["widths", "values", "compile"])
    assert report.dtypes["float32"] is False
    assert report.diagnoses[0].endswith(f"Changes {said}"), report
    assert not any("torch.compile" in diagnosis for diagnosis in report.diagnoses), report


def test_each_dtype_has_its_verdict() -> None:
    report = check(sabotages.StatisticsOfTheInput, ["widths", "values", "layouts"])
    assert report.dtypes == {"float32": True, "bfloat16": False, "float16": False, "float64": True}
    report = check(sabotages.NoFloat64, ["widths", "values"])
    assert report.dtypes == {"float32": True, "bfloat16": True, "float16": True}


def test_four_mistakes_are_all_named() -> None:
    """As a first attempt has them: torch.std, plus eps, in whatever dtype the input has."""
    report = check(sabotages.FirstAttempt, "*near sqrt(eps)")
    assert report.diagnoses == [
        "variance divides by n - 1",
        "eps is added to the deviation, not to the variance",
        "statistics are kept in float16 for float16 input",
        "statistics are kept in bfloat16 for bfloat16 input",
    ]


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("std_eps", "eps is added to the deviation"),
        ("rms", "the mean is not subtracted"),
        ("dyt", "neither the mean nor the deviation"),
    ],
)
def test_inexact_registered_norms_are_named_for_what_they_are(name: str, mistake: str) -> None:
    report = check(name, "values")
    assert not report.passed
    assert mistake in report.diagnoses[0], report


def test_what_cannot_be_compiled_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(module: nn.Module, **settings: object) -> None:
        raise RuntimeError("no such backend")

    monkeypatch.setattr(torch, "compile", refuse)
    report = check("fused", "compile")
    assert not report.passed
    said = report.diagnoses[0]
    assert said.startswith("it fails under torch.compile: it raises RuntimeError: no such backend"), said


@pytest.mark.usefixtures("unchecked")
def test_one_cause_is_one_diagnosis() -> None:
    """What follows from a mistake (other gradients, other widths) is not listed beside it."""
    report = check(sabotages.DividesByNMinusOne, ["widths", "values", "layouts", "behaviour", "gradients"])
    assert len(report.failures) > 20
    assert report.diagnoses == ["variance divides by n - 1"]


@pytest.mark.usefixtures("unchecked")
def test_a_mistake_everywhere_is_not_told_as_one_of_a_part() -> None:
    """Not of the layouts and widths that it is asked in, nor of float32 since half precision does not show it."""
    report = check(sabotages.EpsTwice, "*")
    assert len(report.failures) > 20
    assert report.diagnoses == ["no mistake known by name; the first case that fails is 'width 2'"]


def test_what_is_no_function_of_its_input_has_no_formula() -> None:
    assert check(sabotages.Draws, ["values", "behaviour"]).diagnoses == ["it answers differently from call to call"]


def test_rounding_that_depends_on_the_batch_is_called_rounding() -> None:
    class BySum(sabotages.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = sabotages.exact(self, x)
            return y * (1 + 2**-23) if x.ndim == 2 and len(x) == 1 else y

    said = check(BySum, ["values", "behaviour"]).diagnoses
    assert said == ["a row depends on its batch, by rounding alone"]
    said = check(sabotages.LooksAtItsBatch, ["values", "behaviour"]).diagnoses
    assert said == ["a row depends on its batch, by rounding alone"]


@pytest.mark.usefixtures("unchecked")
def test_rounding_hides_no_other_mistake() -> None:
    """Means by a matrix product, whose column of 1/n goes to half precision with the weights."""

    class ByProducts(sabotages.LayerNorm):
        def __init__(self, width: int, eps: float) -> None:
            super().__init__(width, eps)
            self.register_buffer("shares", torch.full((width, 1), 1 / width), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            shares = self.get_buffer("shares").to(wide.dtype)
            centred = wide - wide @ shares
            y = centred * torch.rsqrt((centred * centred) @ shares + self.eps) * self.weight
            return (y if self.bias is None else y + self.bias).to(x.dtype)

    said = check(ByProducts, ["values", "behaviour"]).diagnoses
    assert "wrong only for float16 input" in said, said


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("norm", "case", "said"),
    [
        (sabotages.DividesByNMinusOne, "width 64", "variance divides by n - 1"),
        (sabotages.ScaleAddedToOne, "gradients, ordinary rows", "the scale is added to 1"),
        (sabotages.OverDimensionOne, "*", "normalizes over the wrong dimension: over the sequence of a (batch, "),
    ],
)
def test_nothing_is_said_of_a_dtype_that_was_not_asked_for_or_is_wrong_too(
    norm: type[nn.Module], case: str, said: str
) -> None:
    found = check(norm, case).diagnoses
    assert found[0].startswith(said), found
    assert "but not for" not in found[0]


@pytest.mark.usefixtures("unchecked")
def test_a_dimension_that_is_wrong_for_one_dtype_is_told_so() -> None:
    class OverTheBatchOfFloat64(sabotages.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.dtype != torch.float64:
                return sabotages.exact(self, x)
            y = (x - x.mean(0)) / torch.sqrt(x.var(0, correction=0) + self.eps) * self.weight
            return y if self.bias is None else y + self.bias

    (said, *_) = check(OverTheBatchOfFloat64, ["values", "layouts"]).diagnoses
    assert said.startswith("normalizes over the wrong dimension: over the batch")
    assert said.endswith("but not for float32 input")


class OfAThousand(sabotages.LayerNorm):
    """As a kernel with too small a block, and bfloat16 by cutting off, as Triton's interpreter has it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        shift = None if self.bias is None else self.bias.to(wide)
        y = torch.nn.functional.layer_norm(x.to(wide), self.normalized_shape, self.weight.to(wide), shift, self.eps)
        y = (y.view(torch.int32) & -0x10000).view(torch.float32) if x.dtype == torch.bfloat16 else y
        y = y.to(x.dtype)
        return torch.where(torch.arange(x.shape[-1]) < 1024, y, 0) if x.shape[-1] > 1024 else y


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("interpreted", [False, True])
def test_a_width_is_wrong_and_a_dtype_too(interpreted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1" if interpreted else "0")
    said = check(OfAThousand, ["widths", "values"]).diagnoses
    assert any(one.startswith("wrong only at width 1280, 1600") for one in said), said
    (of_bfloat16,) = (one for one in said if "bfloat16" in one)
    assert ("Triton kernel" in of_bfloat16) is interpreted


@pytest.mark.usefixtures("unchecked")
def test_a_norm_that_compiles_itself_is_compiled_in_every_case() -> None:
    torch._dynamo.reset()
    seen: list[int] = []

    def counting(graph: Any, inputs: Any) -> Any:
        seen.append(1)
        return graph.forward

    class Compiled(sabotages.LayerNorm):
        @torch.compile(backend=counting, dynamic=False)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sabotages.exact(self, x)

    report = check(Compiled, ["widths", "a row*"])
    assert report.passed, report
    assert len(seen) > 20, "and not only until torch.compile has had enough"


def test_an_unknown_mistake_is_called_so() -> None:
    class Odd(sabotages.LayerNorm):
        def standardize(self, x: torch.Tensor) -> torch.Tensor:
            return super().standardize(x).clamp(-3, 3)  # beyond which few rows go

    assert check(Odd, "float32, *").diagnoses == [
        "no mistake known by name; the first case that fails is 'float32, ordinary rows'"
    ]


@pytest.mark.parametrize("norm", ["fused", "textbook", *sabotages.CORRECT])
@pytest.mark.parametrize("seed", range(3))
def test_no_probe_blames_a_correct_norm(norm: type[nn.Module] | str, seed: int) -> None:
    probe = Probe(Subject(norm, torch.device("cpu"), seed=seed))
    looks = (wrong_dimension, wrong_affine, wrong_statistics, wrong_deviation, ignored_eps, narrow_statistics)
    found = [said for look in (*looks, cancelling_variance) for said in look(probe)]
    for dtype in (torch.float16, torch.bfloat16):
        found += narrow_half_statistics(probe, dtype)
    assert found == []


def test_a_norm_that_raises_on_every_probe_is_still_diagnosed() -> None:
    class Moody(sabotages.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[-1] != 64:
                raise RuntimeError("64 only")
            return sabotages.exact(self, x)

    report = check(Moody, "width*")
    assert "Moody raised RuntimeError: 64 only" in report.diagnoses[0], report
    assert len(report.diagnoses) == 1, report
    subject = Subject(Moody, torch.device("cpu"))
    assert diagnoses(subject, report.cases) == report.diagnoses
