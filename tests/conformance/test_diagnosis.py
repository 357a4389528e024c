"""Every mistake is named, and a correct norm is never blamed for one."""

import pytest
import sabotages
import torch
from torch import nn

from minigpt.conformance import ConformanceReport, check_norm
from minigpt.conformance.case import Subject
from minigpt.conformance.diagnosis import TABLES, Diagnosis, backward_mistakes, closest_formula, formula, wrong_formula
from minigpt.device import DTYPES
from minigpt.norms import LayerNorm

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
    for said, start in zip(report.diagnoses, expected, strict=True):
        assert said.startswith(start), report.diagnoses


SINGLE = [(at, name) for at, table in enumerate(TABLES) for name in table if name]


@pytest.mark.parametrize(("at", "name"), SINGLE, ids=lambda part: str(part)[:60])
def test_each_formula_of_the_tables_is_named_as_itself_and_as_nothing_else(at: int, name: str) -> None:
    parts = [table[name if place == at else ""] for place, table in enumerate(TABLES)]

    def forward(norm: LayerNorm, x: torch.Tensor) -> torch.Tensor:
        assert norm.bias is not None
        return formula(x.double(), norm.weight.double(), norm.bias.double(), parts).to(x.dtype)

    norm = type("Norm", (LayerNorm,), {"forward": forward})
    assert closest_formula(Subject(norm, torch.device("cpu"))) == [name]


GRADIENTS = ["float32, ordinary rows", "overlapping calls", "many calls", "gradients, [!0-9wbs]*"]
CHANGES = {
    "the scale is multiplied twice": lambda p: {"g": p["g"] * p["w"]},
    "the second term is subtracted twice": lambda p: {"second": 2},
    "the first term, mean(g), is over n - 1": lambda p: {"first": p["n"] / (p["n"] - 1)},
    "it is divided by the variance": lambda p: {"r": p["r"] ** 2},
    "eps is left out": lambda p: {"r": (p["r"] ** -2 - 1e-5) ** -0.5},
    "the incoming gradient is rounded to bfloat16": lambda p: {"g": sabotages.bfloat16(p["dy"]) * p["w"]},
    "it has the wrong sign": lambda p: {"times": -1},
    "it is 0": lambda p: {"times": 0},
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_formula_of_the_backward_pass_is_named(name: str) -> None:
    change = CHANGES[name]
    forward = lambda n, x: sabotages.Backward.apply(x, n.weight, n.bias, n.eps, change)  # noqa: E731
    norm = type("Norm", (LayerNorm,), {"forward": forward})
    assert check(norm, GRADIENTS).diagnoses == [f"{sabotages.OF_INPUT}{name}"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("factor", [0.5, 0.75, 0.9, 1.1, 2.0, 3.0])
@pytest.mark.parametrize("part", ["input", "weight", "bias"])
def test_a_factor_of_a_gradient_is_named(part: str, factor: float, dtype: str) -> None:
    key = {"input": "times", "weight": "sum", "bias": "sum_bias"}[part]
    times = factor if part == "input" else lambda terms: factor * terms.sum(0)
    forward = lambda n, x: sabotages.Backward.apply(  # noqa: E731
        x, n.weight, n.bias, n.eps, lambda p: {key: times} if x.dtype == DTYPES[dtype] else {}
    )
    cases = ["float32, ordinary rows", f"gradients, {'ordinary rows' if dtype == 'float32' else dtype}"]
    (said,) = check(type("Norm", (LayerNorm,), {"forward": forward}), cases).diagnoses
    where = "" if dtype == "float32" else f", for {dtype} input"
    assert said == f"the gradient of the {part} is wrong: it is multiplied by {factor:g}{where}"


def test_the_dtype_that_is_judged_comes_first() -> None:
    report = check(sabotages.WrongInHalfAndBackward, ["width 64", "values", "gradients, ordinary rows"])
    narrow = [said for said in report.diagnoses if isinstance(said, Diagnosis) and said.dtypes]
    assert len(narrow) == 2
    assert report.diagnoses == [f"{sabotages.OF_INPUT}it is multiplied by 0.9", *narrow]
    assert report.diagnoses_at("float16") == [report.diagnoses[0], narrow[1], narrow[0]]


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
        subject = Subject(norm, torch.device("cpu"), seed=seed)
        assert wrong_formula(subject, {*DTYPES}) == []
        assert backward_mistakes(subject, torch.float32, 24, 64, {"input", "weight", "bias"}) == []
