"""Correct norms pass whatever the seed, the truth is true, and the report says what was measured."""

import json
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import sabotages
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minigpt import ConfigError, LayerNorm, NormError, norms
from minigpt.conformance import ConformanceReport, case_names, check_norm
from minigpt.conformance.case import Measurement, same_numbers, worst, worst_element
from minigpt.conformance.compiling import best_backend
from minigpt.conformance.truth import PRECISIONS, gradient_truth, layer_norm_float64, truth
from minigpt.measure.settings import changed_settings, settings

# Some tests have every shape checked; the longer ones do not, nor those of torch.compile, which would trace the checks
unchecked = pytest.mark.usefixtures("unchecked")

RANDOM = ["widths", "values", "special", "layouts", "behaviour", "gradients"]  # all but 65,535 rows and torch.compile
EXACT = [name for name, info in norms.available().items() if info.exact and info.available and name != "triton"]


def check(norm: object, cases: str | list[str] = "*", seed: int = 0) -> ConformanceReport:
    return check_norm(norm, device="cpu", cases=cases, seed=seed, compile_backend="aot_eager")  # pyright: ignore


@unchecked
@pytest.mark.parametrize("name", EXACT)
def test_every_exact_registered_norm_passes(name: str, device: torch.device) -> None:
    report = check_norm(name, device=device, compile_backend="aot_eager")
    assert report.passed, report
    assert report.diagnoses == []
    assert [case.name for case in report.cases] == case_names()


@unchecked
@pytest.mark.parametrize("norm", sabotages.CORRECT)
@pytest.mark.thorough
def test_correct_norms_written_otherwise_pass(norm: type[nn.Module]) -> None:
    report = check(norm, RANDOM)
    assert report.passed, report


@unchecked
@pytest.mark.parametrize("norm", [sabotages.GammaBeta, nn.LayerNorm])
def test_correct_norms_written_otherwise_compile(norm: type[nn.Module]) -> None:
    report = check(norm, "compile")
    assert report.passed, report


@pytest.mark.parametrize("norm", sabotages.LOOPS)
def test_sums_in_the_least_exact_order_pass(norm: type[nn.Module]) -> None:
    report = check(norm, ["float32, *", "bfloat16, *", "width ?", "width 768", "gradients, constant rows"])
    assert report.passed, report


@unchecked
@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range(seed: int) -> None:
    with pytest.raises(ConfigError, match=r"^seed must be from 0 to 2\^63 - 1, got "):
        check("fused", seed=seed)


@unchecked
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.thorough
def test_no_seed_fails_a_correct_norm(seed: int) -> None:
    """Of the correct norms each seed takes another."""
    candidates = ["fused", "textbook", *sabotages.CORRECT]
    report = check(candidates[seed % len(candidates)], ["widths", "values", "layouts", "gradients"], seed)
    assert report.passed, report


@unchecked
@pytest.mark.thorough
def test_inductor_agrees_with_eager() -> None:
    if best_backend(torch.device("cpu")) != "inductor":
        pytest.skip("needs a C++ compiler, which inductor generates code for")
    report = check_norm("textbook", device="cpu", cases="compiled equals eager")
    assert report.passed, report
    assert report.cases[0].note == "compiled with inductor"


@unchecked
def test_without_a_compiler_the_trace_is_run_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert best_backend(torch.device("cpu")) == "aot_eager"
    report = check_norm("fused", device="cpu", cases="compiled equals eager")
    assert report.cases[0].note == "compiled with aot_eager"


# --- The truth and its bounds ---


def by_fractions(row: list[float], eps: float) -> list[float]:
    """LayerNorm of one row in exact arithmetic but for the last square root and division."""
    from fractions import Fraction

    exact = [Fraction(value) for value in row]
    mean = sum(exact) / len(exact)
    var = sum((value - mean) ** 2 for value in exact) / len(exact)
    return [float(value - mean) / math.sqrt(var + Fraction(eps)) for value in exact]


@pytest.mark.parametrize("mean", [0.0, 1.0, 1e3, 1e8])
def test_the_truth_is_exact_whatever_the_mean(mean: float) -> None:
    row = torch.randn(33, dtype=torch.float64) + mean
    expected = torch.tensor(by_fractions(row.tolist(), 1e-5), dtype=torch.float64)
    found = layer_norm_float64(row[None], torch.ones(33, dtype=torch.float64), None, 1e-5)[0]
    assert (found - expected).abs().max() < 4e-15, (found - expected).abs().max()
    naive = F.layer_norm(row, (33,), eps=1e-5)
    bound = truth(row[None], torch.ones(33, dtype=torch.float64), None, 1e-5).bound[0]
    assert ((naive - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_bounds_are_near_what_rounding_does(dtype: torch.dtype) -> None:
    """Wide enough for PyTorch's own layer_norm, and not ten times wider where the result's rounding decides."""
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((200, 64), (64,), (64,)))
    values, bound = truth(x, weight, bias, 1e-5)
    ratio = (F.layer_norm(x, (64,), weight, bias, 1e-5).double() - values).abs() / bound
    assert 0.1 < ratio.max() <= 1, ratio.max()


def test_gradient_truth_is_that_of_layer_norm() -> None:
    x, dy = torch.randn(2, 6, 16, dtype=torch.float64)
    weight, bias = torch.randn(2, 16, dtype=torch.float64)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    expected = torch.autograd.grad(F.layer_norm(leaves[0], (16,), leaves[1], leaves[2], 1e-5), leaves, dy)
    true = gradient_truth(x, weight, bias, 1e-5, dy)
    for name, gradient in zip(("input", "weight", "bias"), expected, strict=True):
        assert ((gradient - true[name].values).abs() <= true[name].bound).all()
        assert true[name].bound.max() < 1e-11 * gradient.abs().max().clamp(min=1)
    assert set(gradient_truth(x, weight, None, 1e-5, dy)) == {"input", "weight"}


# --- Measuring ---


def test_the_worst_element_is_the_one_furthest_beyond_its_own_bound() -> None:
    expected, bound = torch.zeros(3).double(), torch.tensor([10.0, 1e-3, 1.0]).double()
    found = worst_element(torch.tensor([5.0, 2e-3, 0.5]), expected, bound)
    assert (found.error, found.bound) == (pytest.approx(2e-3), pytest.approx(1e-3))


def test_nan_is_never_within_a_bound() -> None:
    found = worst_element(torch.tensor([0.0, torch.nan]), torch.zeros(2).double(), torch.full((2,), 1e9).double())
    assert not found.within
    assert found.ratio == math.inf
    assert not same_numbers(torch.tensor([torch.nan]), torch.zeros(1)).within
    assert same_numbers(torch.tensor([torch.nan, torch.inf]), torch.tensor([torch.nan, torch.inf])).within


def test_worst_names_the_measurement() -> None:
    measured = {"a": Measurement(1.0, 2.0), "b": Measurement(1e-9, 0.0), "c": Measurement(9.0, 10.0)}
    assert worst(measured) == (1e-9, 0.0, None, "worst at b")


# --- The report ---


def test_the_report_is_stable_json() -> None:
    report, again = (check("textbook", ["values", "behaviour"]) for _ in range(2))
    assert report == again
    fields = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert list(fields) == [
        "verdict", "norm", "device", "eps", "seed", "versions", "notes", "cases", "diagnoses", "dtypes",
    ]  # fmt: skip
    assert (fields["verdict"], fields["norm"], fields["device"], fields["eps"]) == ("pass", "textbook", "cpu", 1e-5)
    for case in fields["cases"]:
        assert list(case) == [
            "name", "group", "tests", "error", "bound", "reference_error", "reason", "passed", "dtypes",
            "note",
        ]  # fmt: skip
        assert case["tests"]
        assert case["reason"]


def test_a_case_draws_the_same_numbers_whatever_ran_before_it() -> None:
    whole = check("fused", "values")
    alone = check("fused", "float16, massive activations")
    assert alone.cases[0] in whole.cases
    assert check("fused", "float16, massive activations", seed=1).cases[0].error != alone.cases[0].error


def test_errors_that_are_not_numbers_are_null_in_json() -> None:
    report = check(sabotages.NaNForConstantRows, "float32, constant rows")
    assert math.isnan(report.cases[0].error or 0)
    assert report.to_dict()["cases"][0]["error"] is None
    assert "error nan" in str(report)


def test_reference_error_stands_beside_the_norm_s() -> None:
    case = check(sabotages.DifferenceOfSquares, "float32, mean far from 0").cases[0]
    assert not case.passed
    assert case.reference_error is not None
    assert case.error is not None
    assert case.bound is not None
    assert case.reference_error < case.bound < case.error


def test_what_is_not_supported_is_said() -> None:
    report = check(sabotages.GammaBeta, ["another eps", "rows of several dimensions"])
    assert report.passed
    assert "one dimension only" in report.cases[0].note
    assert report.cases[1].note == "not judged: its eps cannot be set"
    assert any("eps" in note for note in report.notes)
    report = check(sabotages.NoFloat64, ["float64, *", "gradients, finite differences"])
    assert report.passed
    assert all("not judged: it refuses float64" in case.note for case in report.cases)


def test_progress_names_each_group() -> None:
    said: list[tuple[str, float]] = []
    check_norm("fused", device="cpu", cases=["widths", "layouts"], progress=lambda *step: said.append(step))
    assert said == [("checking widths", 0.0), ("checking layouts", 1 / 3)]


# --- What cannot be judged ---


class RaisesInForward(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("no such kernel")


class TextsAlone(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        _texts, _tokens, _width = x.shape
        return super().forward(x)


class RaisesInConstructor(nn.Module):
    def __init__(self, size: int) -> None:
        raise RuntimeError("no such size")


@pytest.mark.parametrize(
    ("norm", "said"),
    [
        ("no_such_norm", "unknown norm 'no_such_norm'"),
        ("frozen", "has not|no deviation"),
        (RaisesInForward, "RaisesInForward.*no such kernel.*test_conformance.py"),
        (TextsAlone, "ValueError: not enough values.*takes only .batch, sequence, width., but the check needs .rows"),
        (RaisesInConstructor, "RaisesInConstructor.*no such size.*test_conformance.py"),
    ],
)
def test_what_cannot_be_judged_says_why(norm: type[nn.Module] | str, said: str) -> None:
    with pytest.raises(NormError, match=said) as caught:
        check(norm, "values")
    assert "\n" not in str(caught.value)


def test_bad_requests_are_refused() -> None:
    with pytest.raises(NormError, match="no case matches 'shapes'; the groups of cases are widths, rows, values"):
        check("fused", "shapes")
    with pytest.raises(ConfigError, match="device 'meta' holds shapes and no values"):
        check_norm("fused", device="meta")
    with pytest.raises(NormError, match="no case matches 'nothing'"):
        check_norm("rms", cases=[])
    with pytest.raises(ConfigError, match=r"unknown compile_backend .abacus.; known are .*inductor"):
        check_norm("fused", cases="compile", compile_backend="abacus")
    with pytest.raises(ConfigError, match="unknown device 'abacus'"):
        check_norm("fused", device="abacus")


def test_it_leaves_the_process_as_it_was() -> None:
    torch.manual_seed(7)
    expected = torch.randn(3)
    torch.manual_seed(7)
    before = torch.get_float32_matmul_precision(), torch.is_grad_enabled(), list(warnings.filters)
    check("fused", ["values", "gradients"])
    assert torch.equal(torch.randn(3), expected)
    assert (torch.get_float32_matmul_precision(), torch.is_grad_enabled(), list(warnings.filters)) == before


def test_it_goes_with_the_newer_setting_of_precision() -> None:
    """Beside which PyTorch refuses to read the older one."""
    before, torch.backends.cuda.matmul.fp32_precision = torch.backends.cuda.matmul.fp32_precision, "tf32"
    try:
        assert check("fused", ["values"]).passed
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


# --- Modes and shapes ---


class WrongInTraining(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.002 if self.training else 1)


class WrongForInference(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.002 if torch.is_inference_mode_enabled() else 1)


class WrongGradientsOfTokens(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 3:
            x = torch.cat([x[:1], x[1:].detach()])
        return super().forward(x)


class ModifiesTokens(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x.clone())
        return y if x.ndim < 3 else x.data.sub_(1) * 0 + y


class ModifiesOneToken(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return x.data.copy_(y) if x.shape[:-1] == (1, 1) else y


class WrongInDecoding(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.01 if x.ndim == 3 and x.shape[1] == 1 < len(x) else 1)


class KeepsItsWeights(LayerNorm):
    """As one that packs them at its first inference."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return sabotages.exact(self, x)
        if not hasattr(self, "packed"):
            self.packed = self.weight.clone(), None if self.bias is None else self.bias.clone()
        return F.layer_norm(x, self.normalized_shape, *self.packed, self.eps)


class Seeds(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return super().forward(x)


class KeepsNoGradients(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        torch.set_grad_enabled(self.training)
        return y


class SetsTheDefaultDtype(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.bfloat16)
        return super().forward(x)


class LeavesAutocastOn(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        torch.set_autocast_enabled("cpu", True)
        return y


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("norm", "named", "said"),
    [
        (WrongInTraining, "any mode", "its values depend on training mode"),
        (WrongForInference, "any mode", "its values depend on training mode"),
        (WrongGradientsOfTokens, "gradients, as tokens", "gradients are wrong though values are right"),
        (ModifiesTokens, "input left as it was", "it modifies its input"),
        (ModifiesOneToken, "input left as it was", "it modifies its input"),
        (WrongInDecoding, "decoding input", "wrong only for a batch of one token each"),
        (KeepsItsWeights, "weights that change", "it keeps its weights"),
        (Seeds, "settings left as they were", "it changes PyTorch's random numbers"),
        (KeepsNoGradients, "settings left as they were", "it changes whether PyTorch keeps gradients"),
        (LeavesAutocastOn, "settings left as they were", "it changes PyTorch's autocast"),
        (SetsTheDefaultDtype, "settings left as they were", "it changes PyTorch's default dtype"),
    ],
)
def test_what_shows_in_one_place_alone_is_found(norm: type[LayerNorm], named: str, said: str) -> None:
    before = settings()
    report = check(norm, ["special", "layouts", "behaviour", named])
    assert named in [case.name for case in report.failures]
    assert report.diagnoses[0].startswith(said), report
    assert len(report.diagnoses) == 1, report
    assert changed_settings(before) == []


# Where an addition and a norm in one may go another way than for rows of float32
ONE_SUM: dict[str, Callable[[LayerNorm, Tensor, Tensor], bool]] = {
    "texts": lambda norm, residual, delta: residual.ndim == 3,
    "one token each": lambda norm, residual, delta: residual.shape[1] == 1 < len(residual),
    "one token": lambda norm, residual, delta: residual.shape[:-1] == (1, 1),
    "a width that no block fits": lambda norm, residual, delta: residual.shape[-1] % 8 > 0,
    "other strides": lambda norm, residual, delta: not residual.is_contiguous(),
    "training": lambda norm, residual, delta: norm.training,
    "mixed dtypes": lambda norm, residual, delta: residual.dtype != delta.dtype,
    "a NaN": lambda norm, residual, delta: bool(residual.isnan().any()),
    "float16": lambda norm, residual, delta: residual.dtype == torch.float16,
    "constant rows": lambda norm, residual, delta: bool(((residual + delta).std(-1) == 0).any()),
    "rows far from 0": lambda norm, residual, delta: bool(((residual + delta).mean(-1).abs() > 99).any()),
    "another eps": lambda norm, residual, delta: norm.eps == 1e-3,
    "texts with other strides": lambda norm, residual, delta: delta.ndim == 3 and not delta.is_contiguous(),
}


@pytest.mark.thorough
@pytest.mark.parametrize("wrong", ONE_SUM.values(), ids=ONE_SUM)
def test_sums_that_are_wrong_in_one_place_alone_are_found(wrong: Callable[[LayerNorm, Tensor, Tensor], bool]) -> None:
    class WrongSums(sabotages.AddsTheResidualToo):
        def add_norm(self, residual: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
            total, y = super().add_norm(residual, delta)
            return total, 1.01 * y if wrong(self, residual, delta) else y

    assert check(sabotages.AddsTheResidualToo, "residual added too*").passed
    said = check(WrongSums, ["float32, ordinary rows", "residual added too*"]).diagnoses
    assert said[-1] == "wrong only where it adds the residual too, in add_norm", said


class AddsFromOldWeights(sabotages.AddsTheResidualToo):
    """Its addition computes with the weights that it was first called with."""

    def add_norm(self, residual: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        kept = vars(self).setdefault("_kept", (self.weight.detach().clone(), self.bias.detach().clone()))
        total = residual + delta
        return total, F.layer_norm(total, self.normalized_shape, *(part.to(total.dtype) for part in kept), self.eps)


class AddsLouderWithoutBias(sabotages.AddsTheResidualToo):
    def add_norm(self, residual: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        total, y = super().add_norm(residual, delta)
        return total, 2 * y if self.bias is None else y


class AddsByTheBatch(sabotages.AddsTheResidualToo):
    def add_norm(self, residual: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        total, y = super().add_norm(residual, delta)
        return total, 1.5 * y if total.numel() > 100 * total.shape[-1] else y


class AddsAtRandom(sabotages.AddsTheResidualToo):
    def add_norm(self, residual: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        torch.rand(1)
        return super().add_norm(residual, delta)


class AddsWithoutGradientInTraining(sabotages.AddsTheResidualToo):
    def add_norm(self, residual: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        total, y = super().add_norm(residual, delta)
        return total, y.detach() + 0 * total if self.training else y


@pytest.mark.parametrize(
    ("norm", "cases"),
    [
        (AddsFromOldWeights, "weights that change"),
        (AddsLouderWithoutBias, "no bias"),
        (AddsByTheBatch, "a row in any company"),
        (AddsAtRandom, "settings left as they were"),
        (AddsWithoutGradientInTraining, "gradients, residual added too"),
    ],
)
def test_sums_are_held_to_what_the_norm_itself_is(norm: type[LayerNorm], cases: str) -> None:
    assert check(sabotages.AddsTheResidualToo, cases).passed
    assert not check(norm, cases).passed


# Where a backward pass may go another way than for ordinary rows: the cases that ask, and what they are told by
ONE_SETTING: dict[str, Callable[[LayerNorm, Tensor], bool]] = {
    "float16": lambda norm, x: x.dtype == torch.float16,
    "1,000 rows": lambda norm, x: len(x) > 64,
    "width 1001, width 1600": lambda norm, x: x.shape[-1] > 768,
    "no bias": lambda norm, x: norm.bias is None,
    "input transposed": lambda norm, x: not x.is_contiguous(),
    "frozen weight, frozen weight and bias": lambda norm, x: not norm.weight.requires_grad,
    "as tokens of one text": lambda norm, x: x.ndim == 3 and x.shape[1] > 8,
    "as one token a text": lambda norm, x: x.ndim == 3 and x.shape[1] == 1,
}


@pytest.mark.thorough
@pytest.mark.parametrize(("named", "wrong"), ONE_SETTING.items(), ids=ONE_SETTING)
def test_gradients_that_are_wrong_in_one_setting_alone_are_found(
    named: str, wrong: Callable[[LayerNorm, Tensor], bool]
) -> None:
    class TwiceTheGradient(LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return sabotages.exact(self, x + (x - x.detach()) if wrong(self, x) else x)

    report = check(TwiceTheGradient, "gradients*")
    assert [case.name for case in report.failures] == [f"gradients, {name}" for name in named.split(", ")]
    assert report.diagnoses == [f"gradients are wrong though values are right, most of all of the input, in {named}"]


class AddsUp(torch.autograd.Function):
    """Identity, whose backward adds to what it kept from the last one."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.calls = 0
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.calls += 1
        return ctx.calls * grads[0]


class WritesIntoItsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].mul_(2) / 2


@pytest.mark.parametrize(
    ("after", "failing", "said"),
    [
        (AddsUp, "gradients, backward twice", "gradients are wrong though values are right"),
        (WritesIntoItsGradient, "gradients, ordinary rows", "it writes into the gradient that it is given"),
    ],
)
def test_a_backward_that_leaves_traces_is_found(after: Any, failing: str, said: str) -> None:
    class LeavesTraces(LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return after.apply(sabotages.exact(self, x))

    report = check(LeavesTraces, "gradients*")
    assert report.failures[0].name == failing
    assert report.diagnoses[0].startswith(said), report


class RoundsOtherwiseWithGradients(LayerNorm):
    """As where another kernel is taken for training."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return super().forward(x)
        return super().forward(x.double()).to(x.dtype)


def test_other_kernels_for_training_may_round_otherwise() -> None:
    report = check(RoundsOtherwiseWithGradients, ["special", "behaviour", "gradients*"])
    assert report.passed, report
