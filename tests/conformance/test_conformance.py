"""Correct norms pass with every seed, the truth is true, and the report says what was measured."""

import json
import math
import re
import warnings
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import sabotages
import torch
import torch.nn.functional as F
from kit import check, failed_dtypes, norm_with
from torch import Tensor, nn

from minigpt import ConfigError, LayerNorm, NormError, norms
from minigpt.conformance import case_names, check_norm
from minigpt.conformance.compare import Kind, compare
from minigpt.conformance.summary import conformance_page
from minigpt.conformance.truth import PRECISIONS, gradient_truth, truth

# torch.compile would trace the shape checks as well
unchecked = pytest.mark.usefixtures("unchecked")

EXACT = [name for name, info in norms.available().items() if info.exact and info.available and name != "triton"]


@unchecked
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough) if name == "textbook" else name for name in EXACT]
)
def test_every_exact_registered_norm_passes(name: str, device: torch.device) -> None:
    report = check_norm(name, device=device, seed=0)
    assert report.passed, report
    assert report.diagnoses == []
    assert [case.name for case in report.cases] == case_names()


@unchecked
def test_a_correct_norm_written_in_another_way_compiles() -> None:
    report = check(sabotages.GammaBeta, "compile")
    assert report.passed, report


def test_torch_compile_is_not_asked_where_another_case_fails() -> None:
    report = check("identity", ["ordinary rows", "compile"])
    ordinary, compiled = report.cases
    assert compiled.dtypes == {}
    assert {*compiled.refused} == {*ordinary.dtypes}
    assert "0 of 1 cases pass" in str(report)
    assert "compile: 1 of 1 not judged" in conformance_page(report)
    assert "torch.compile is not tried at bfloat16, float16, float32, float64, where other" in report.notes[-1]


@pytest.mark.thorough
@unchecked
def test_every_case_asks_torch_compile_too() -> None:
    report = check_norm("identity", device="cpu", cases=["ordinary rows", "compile"], seed=0, every_case=True)
    assert {*report.cases[-1].dtypes} == {*report.dtypes}
    assert not any("torch.compile" in note for note in report.notes)


OF_A_FILE = """
import torch


class Mine(torch.nn.LayerNorm):
    pass
"""


def test_a_file_that_is_edited_during_the_check_is_read_once(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OF_A_FILE)
    edit = lambda *_: file.write_text("not Python")  # noqa: E731
    report = check_norm(f"{file}:Mine", device="cpu", cases=["ordinary rows", "layouts"], progress=edit)
    assert file.read_text() == "not Python"
    assert report.passed, report


@unchecked
@pytest.mark.parametrize("norm", sabotages.LOOPS)
def test_sums_in_the_least_exact_order_pass(norm: type[nn.Module]) -> None:
    report = check(norm, ["values", "width ?", "width 768", "gradients, constant rows"])
    assert report.passed, report


# --- The truth and its bounds ---


def by_fractions(row: list[float], eps: float) -> list[float]:
    """LayerNorm of one row in exact arithmetic but for the last square root and division."""
    exact = [Fraction(value) for value in row]
    mean = sum(exact) / len(exact)
    var = sum((value - mean) ** 2 for value in exact) / len(exact)
    return [float(value - mean) / math.sqrt(var + Fraction(eps)) for value in exact]


@pytest.mark.parametrize("mean", [0.0, 1.0, 1e3, 1e8])
def test_the_truth_is_exact_whatever_the_mean(mean: float) -> None:
    row = torch.randn(33, dtype=torch.float64) + mean
    expected = torch.tensor(by_fractions(row.tolist(), 1e-5), dtype=torch.float64)
    (actual,), (bound,) = truth(row[None], torch.ones(33, dtype=torch.float64), None, 1e-5)
    assert (actual - expected).abs().max() < 4e-15, (actual - expected).abs().max()
    assert ((F.layer_norm(row, (33,), eps=1e-5) - expected).abs() <= bound).all()


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
    true = gradient_truth(x, weight, 1e-5, dy)
    for name, gradient in zip(("input", "weight", "bias"), expected, strict=True):
        assert ((gradient - true[name].values).abs() <= true[name].bound).all()
        assert true[name].bound.max() < 1e-11 * gradient.abs().max().clamp(min=1)


# --- Measuring ---


def test_the_worst_element_is_the_one_furthest_beyond_its_own_bound() -> None:
    expected, bound = torch.zeros(3).double(), torch.tensor([10.0, 2**-10, 1.0]).double()
    actual = compare("", torch.tensor([5.0, 2**-9, 0.5]), expected, bound)
    assert (actual.error, actual.bound, actual.ratio) == (2**-9, 2**-10, 2)


def test_nan_is_never_within_a_bound() -> None:
    both = torch.tensor([torch.nan, torch.inf])
    assert compare("", torch.tensor([0.0, torch.nan]), torch.zeros(2), 1e9).ratio == math.inf
    assert compare("", both, both, 1e9).ratio == math.inf
    assert compare("", both, both, 0).ratio == math.inf, "also of the same result twice"
    assert compare("", both[1:], both[1:], 0).ratio == 0


def test_rows_that_repeat_are_compared_with_the_first() -> None:
    expected = torch.randn(3, 4)
    value = expected.repeat(3, 1)[:8]
    assert compare("", value, expected, 0.5).ratio == 0
    value[7, 1] += 1
    actual = compare("", value, expected, 0.5)
    assert (actual.kind, actual.place, actual.error) == (Kind.WRONG, "row 7", pytest.approx(1, rel=1e-6))


def test_sums_over_rows_that_repeat_count_each_as_often_as_it_is_there() -> None:
    x, dy, weight = torch.randn(3, 4), torch.randn(3, 4), torch.randn(4)
    again = torch.arange(8) % 3
    whole, first = gradient_truth(x[again], weight, 1e-5, dy[again]), gradient_truth(x, weight, 1e-5, dy, rows=8)
    for name in ("weight", "bias"):
        torch.testing.assert_close(first[name], whole[name])
    torch.testing.assert_close(first["input"].values[again], whole["input"].values)


# --- The report ---


def test_the_report_is_stable_json() -> None:
    report, again = (check("textbook", ["values", "any mode"]) for _ in range(2))
    assert report == again
    fields = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert list(fields) == [
        "verdict", "norm", "kind", "device", "eps", "seed", "versions", "notes", "cases", "diagnoses", "dtypes",
        "coverage",
    ]  # fmt: skip
    assert (fields["verdict"], fields["norm"], fields["device"], fields["eps"]) == ("pass", "textbook", "cpu", 1e-5)
    for case in fields["cases"]:
        assert set(case) >= {"name", "group", "tests", "error", "bound", "reason", "passed", "dtypes", "note", "place"}
        assert case["tests"]
        assert case["reason"]


def test_a_case_draws_the_same_numbers_whatever_ran_before_it() -> None:
    whole = check("fused", "values")
    alone = check("fused", "massive activations")
    assert alone.cases[0] in whole.cases
    assert check("fused", "massive activations", seed=1).cases[0].worst != alone.cases[0].worst


def test_errors_that_are_not_numbers_are_null_in_json() -> None:
    report = check(sabotages.NaNForAnyRow, "constant rows")
    assert math.isnan(report.cases[0].worst.error or 0)
    assert report.to_dict()["cases"][0]["error"] is None
    assert "error not finite" in str(report)


def test_what_is_not_supported_is_said() -> None:
    report = check(sabotages.GammaBeta, "another eps")
    assert report.passed
    assert set(report.cases[0].refused.values()) == {"its eps cannot be set"}
    assert any("eps" in note for note in report.notes)
    report = check(sabotages.NoFloat64, ["values"])
    assert report.passed
    assert report.dtypes == {"float32": True, "bfloat16": True, "float16": True}
    assert all("float64 is not supported" in case.refused["float64"] for case in report.cases)


# --- What cannot be judged ---


def interrupted(n: LayerNorm, x: Tensor) -> Tensor:
    raise KeyboardInterrupt


class OnlyGroups(nn.Module):
    """Takes (batch, sequence, width) only, and has its scale and shift in a module of its own."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, dim)

    def forward(self, x: Tensor) -> Tensor:
        _batch, _tokens, _width = x.shape
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize(
    ("norm", "message"),
    [
        (OnlyGroups, "OnlyGroups, given .4, 64. in float32, raised ValueError: not enough values.*test_conformance.py"),
        ("no_such_norm", "unknown norm 'no_such_norm'"),
        (norm_with(sabotages.raises("no such kernel", lambda n, x: True)), "Norm.*no such kernel.*sabotages.py"),
    ],
)
def test_what_cannot_be_judged_says_why(norm: type[nn.Module] | str, message: str) -> None:
    with pytest.raises(NormError, match=message) as caught:
        check(norm, "values")
    assert "\n" not in str(caught.value)


def test_an_interrupt_is_no_result() -> None:
    with pytest.raises(KeyboardInterrupt):
        check(norm_with(interrupted), "values")


def test_bad_requests_are_refused() -> None:
    with pytest.raises(NormError, match="no case matches 'shapes'; the groups of cases are values, widths, sizes"):
        check("fused", "shapes")
    with pytest.raises(ConfigError, match="device 'meta' holds shapes and no values"):
        check_norm("fused", device="meta")
    with pytest.raises(NormError, match="no case matches"):
        check_norm("rms", cases=[])


def test_it_leaves_the_process_as_it_was() -> None:
    check("fused", "ordinary rows")  # imports PyTorch's compiler, which adds filters of warnings
    torch.manual_seed(7)
    expected = torch.randn(3)
    torch.manual_seed(7)
    before = torch.get_float32_matmul_precision(), torch.is_grad_enabled(), list(warnings.filters)
    check("fused", ["ordinary rows", "behaviour", "gradients, ordinary rows"])
    assert torch.equal(torch.randn(3), expected)
    assert (torch.get_float32_matmul_precision(), torch.is_grad_enabled(), list(warnings.filters)) == before


def test_training_kernels_may_round_in_another_way() -> None:
    wide = lambda n, x: x if torch.is_grad_enabled() else x.double()  # noqa: E731
    norm = norm_with(lambda n, x: LayerNorm.forward(n, wide(n, x)).to(x.dtype))
    report = check(norm, ["infinity*", "behaviour", "gradients, ordinary rows"])
    assert report.passed, report


def test_what_changes_the_process_is_undone_and_noted() -> None:
    def changes_the_process(norm: LayerNorm, x: Tensor) -> Tensor:
        torch.use_deterministic_algorithms(True)
        return LayerNorm.forward(norm, x)

    report = check(norm_with(changes_the_process), "ordinary rows")
    assert report.passed
    assert "it changes the process: deterministic mode" in report.notes
    assert not torch.are_deterministic_algorithms_enabled()


BY_ITSELF = "each value is computed by itself"
INEXACT = {  # the diagnosis of each registered norm that is no LayerNorm
    "std_eps": "std + eps in place of sqrt(variance + eps)", "rms": "no mean subtracted (an RMSNorm)",
    "dyt": BY_ITSELF, "derf": BY_ITSELF, "hardtanh": BY_ITSELF, "identity": BY_ITSELF,
    "mix": "the mean is not subtracted, or not whole", "no_affine": "no scale and no shift",
    "no_scale": "no division by the deviation",
    "detached": "the gradient of the input is wrong: the statistics are detached",
}  # fmt: skip


@unchecked
@pytest.mark.parametrize("name", [name for name, info in norms.available().items() if not info.exact])
def test_inexact_registered_norms_are_named_for_what_they_are(name: str) -> None:
    if name in ("frozen", "taper"):
        with pytest.raises(NormError, match="no deviation"):
            check(name, "ordinary rows")
        return
    report = check_norm(name, kind="layer_norm", device="cpu", cases=["ordinary*", "gradients, ordinary*"], seed=0)
    assert report.diagnoses[0].startswith(INEXACT[name])


class Gemma(nn.Module):
    """An RMSNorm that multiplies by 1 + weight, and rounds before that."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().mean(-1, True) + self.eps)).to(x.dtype) * (1 + self.weight)


class Llama(Gemma):
    """It multiplies by its weight."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__(dim, eps)
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, True) + self.eps)).to(x.dtype)


MOST = ["values", "layouts", "behaviour", "width ?", "width 768", "gradients, [!wbs0-9]*", "gradients, 257 rows"]


@unchecked
@pytest.mark.parametrize(
    ("norm", "kind"),
    [
        ("rms", None),
        pytest.param(Llama, "rms_norm", marks=pytest.mark.thorough),
        pytest.param(nn.RMSNorm, None, marks=pytest.mark.thorough),
        pytest.param(Gemma, "rms_norm", marks=pytest.mark.thorough),
    ],
)
def test_an_rms_norm_passes_as_one_and_not_as_a_layer_norm(norm: type[nn.Module] | str, kind: str | None) -> None:
    report = check_norm(norm, kind=kind, device="cpu", cases=MOST, seed=0)
    assert report.passed, report
    assert report.kind == report.to_dict()["kind"] == "rms_norm"
    assert " is an RMSNorm on cpu: " in str(report)
    assert any("rounds its row" in note for note in report.notes) is (norm is Llama)
    report = check_norm(norm, kind="layer_norm", device="cpu", cases="ordinary rows", seed=0)
    assert (report.kind, report.diagnoses) == ("layer_norm", ["no mean subtracted (an RMSNorm)"])


ROUNDED = {  # what an RMSNorm rounds beside its row and its result
    "the reciprocal": lambda x, eps: x.float() * (x.float().square().mean(-1, keepdim=True) + eps).rsqrt().to(x.dtype),
    "the mean square": lambda x, eps: x.float() * (x.square().mean(-1, keepdim=True).float() + eps).rsqrt(),
    "everything": lambda x, eps: x * (x.square().mean(-1, keepdim=True) + eps).rsqrt(),
}


@pytest.mark.parametrize(
    ("what", "is_row_rounded"),
    [
        ("the reciprocal", False),
        ("the mean square", True),
        ("everything", False),
        pytest.param("the reciprocal", True, marks=pytest.mark.thorough),
        pytest.param("the mean square", False, marks=pytest.mark.thorough),
        pytest.param("everything", True, marks=pytest.mark.thorough),
    ],
)
def test_an_rms_norm_that_rounds_once_more_fails_in_half_precision(what: str, is_row_rounded: bool) -> None:
    def forward(norm: Any, x: Tensor) -> Tensor:
        row = ROUNDED[what](x, norm.eps)
        return ((row.to(x.dtype) if is_row_rounded else row) * norm.weight).to(x.dtype)

    norm = type("Norm", (Llama,), {"forward": forward})
    report = check_norm(norm, kind="rms_norm", device="cpu", cases=["ordinary*", "roundings"], seed=0)
    assert (report.dtypes["bfloat16"], report.dtypes["float16"]) == (False, False)
    assert re.search("too few bits for bfloat16|rounds otherwise than once", str(report.diagnoses)), report.diagnoses


def test_a_layer_norm_is_no_rms_norm() -> None:
    report = check_norm("fused", kind="rms_norm", device="cpu", cases=["ordinary rows", "gradients, as*"], seed=0)
    assert report.diagnoses == ["the mean subtracted (a LayerNorm)"]
    assert report.verdicts["float32"] == "not an RMSNorm: 3 of 3 cases fail"
    assert [check_norm(norm, device="cpu", cases="ordinary rows").kind for norm in ("dyt", LayerNorm)] == [
        "layer_norm"
    ] * 2
    with pytest.raises(NormError, match="kind of a norm must be layer_norm or rms_norm, got 'rms'"):
        check_norm("fused", kind="rms")


def test_rows_are_new_in_every_run_unless_a_seed_is_given() -> None:
    first, again = (check_norm("fused", device="cpu", cases="ordinary rows") for _ in range(2))
    assert first.seed != again.seed
    assert first.cases[0].worst.error != again.cases[0].worst.error


class WrongTwice(torch.autograd.Function):
    """Right first derivatives, whose own derivatives are cut off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            y = F.layer_norm(leaves[0], leaves[0].shape[-1:], *leaves[1:], 1e-5)
        return torch.autograd.grad(y, leaves, dy)


def test_second_derivatives_are_a_note() -> None:
    assert check("textbook", "ordinary rows").notes == []
    report = check(norm_with(lambda n, x: WrongTwice.apply(x, n.weight, n.bias)), "ordinary rows")
    assert report.passed
    assert report.notes == ["its second derivatives are wrong in float64; training needs only first ones"]


class MultiplesOf64(LayerNorm):
    """It refuses other widths when it is built."""

    def __init__(self, shape: int, eps: float = 1e-5, bias: bool = True) -> None:
        if shape % 64:
            raise ValueError("the width must be a multiple of 64")
        super().__init__(shape, eps, bias)


def test_a_width_that_is_refused_hides_no_mistake_and_is_none() -> None:
    assert check(MultiplesOf64, ["widths", "1,024 rows"]).passed
    losing = type("Losing", (MultiplesOf64,), {"forward": sabotages.beyond(3000, 0, dims=2)})
    assert not check(losing, "65,536 rows").passed


@pytest.mark.thorough
def test_gradients_of_parameters_that_lose_rows_of_long_inputs_are_caught() -> None:
    """In half precision an eighth of such a sum is about what the bound allows."""
    report = check(sabotages.LosesAnEighth, "gradients, *65,53?*")
    assert failed_dtypes(report) >= {"float32", "float64"}
