"""Every mistake is named, and a correct norm is never blamed for one."""

import itertools

import pytest
import sabotages
import torch
from torch import nn

from minigpt.conformance import ConformanceReport, check_norm
from minigpt.conformance.case import Subject
from minigpt.conformance.diagnosis import (
    BACKWARD_PROBES,
    agreed,
    closest_formula,
    structure,
    symptoms,
    wrong_gradient,
)
from minigpt.conformance.mistakes import TABLES, formula
from minigpt.device import DTYPES, HALVES
from minigpt.norms import LayerNorm

# torch.compile would trace the shape checks, and some norms here return other shapes on purpose
pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("unchecked")]

SIZES = ["width 2", "width 64", "width 1025", "257 rows", "65,537 rows", "batch of 257", "sequence of 1,025"]
FAST = [
    *SIZES,
    "values",
    "layouts",
    "behaviour",
    "gradients, [!0-9wbs]*",
    "gradients, width 1025",
    "gradients, 1,025 rows",
]


def check(norm: object, cases: str | list[str]) -> ConformanceReport:
    return check_norm(norm, device="cpu", cases=cases, seed=0)  # pyright: ignore


@pytest.mark.parametrize(
    ("norm", "expected"), sabotages.MISTAKES.items(), ids=lambda norm: getattr(norm, "__name__", "")
)
def test_a_mistake_fails_and_is_named_and_nothing_else_is(norm: type[nn.Module], expected: tuple[str, ...]) -> None:
    report = check(norm, "compile" if norm is sabotages.WrongWhenCompiled else FAST)
    assert not report.passed
    for message, start in zip(report.diagnoses, expected, strict=True):
        assert message.startswith(start), report.diagnoses


SINGLE = [(at, name) for at, table in enumerate(TABLES) for name in table if name]


@pytest.mark.parametrize(("at", "name"), SINGLE, ids=lambda part: str(part)[:60])
def test_each_formula_of_the_tables_is_named_as_itself_and_as_nothing_else(at: int, name: str) -> None:
    parts = [table[name if place == at else ""] for place, table in enumerate(TABLES)]

    def forward(norm: LayerNorm, x: torch.Tensor) -> torch.Tensor:
        assert norm.bias is not None
        return formula(x.double(), norm.weight.double(), norm.bias.double(), parts).to(x.dtype)

    norm = type("Norm", (LayerNorm,), {"forward": forward})
    assert closest_formula(Subject(norm, torch.device("cpu")), torch.float32, (4, 6, 64)) == [name]


GRADIENTS = ["ordinary rows", "backward*", "many calls", "gradients, [!0-9wbs]*"]
CHANGES = {
    "the scale is multiplied twice": lambda p: {"g": p["g"] * p["w"]},
    "the second term is subtracted twice": lambda p: {"second": 2},
    "the first term, mean(g), is over n - 1": lambda p: {"first": p["n"] / (p["n"] - 1)},
    "it is divided by the variance": lambda p: {"r": p["r"] ** 2},
    "eps is left out": lambda p: {"r": (p["r"] ** -2 - 1e-5) ** -0.5},
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
    cases = ["ordinary rows", "gradients, ordinary rows"]
    (mistake,) = check(type("Norm", (LayerNorm,), {"forward": forward}), cases).diagnoses
    assert mistake == f"the gradient of the {part} is wrong: it is multiplied by {factor:g}, at {dtype}"


def test_the_dtype_that_is_judged_comes_first() -> None:
    report = check(sabotages.WrongInHalfAndBackward, ["width 64", "values", "gradients, ordinary rows"])
    first, of_bfloat16, of_float16 = report.diagnoses
    assert first.startswith(f"{sabotages.OF_INPUT}it is multiplied by 0.9")
    assert [mistake.dtypes for mistake in report.mistakes[1:]] == [{"bfloat16"}, {"float16"}]
    assert report.diagnoses_at("float16") == [of_float16, first, of_bfloat16]


def test_what_cannot_be_compiled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(module: nn.Module, **settings: object) -> None:
        raise RuntimeError("no such backend")

    monkeypatch.setattr(torch, "compile", refuse)
    (message,) = check("fused", "compile").diagnoses
    assert message.startswith("it raises RuntimeError: no such backend"), message


def test_the_judgement_says_at_which_dtypes_it_is_wrong() -> None:
    report = check(sabotages.StatisticsOfTheInput, ["width 64", "values", "layouts"])
    assert str(report).startswith("StatisticsOfTheInput is not a LayerNorm at bfloat16, float16 on cpu: ")
    assert report.dtypes == {"float32": True, "bfloat16": False, "float16": False, "float64": True}


def test_a_norm_that_needs_a_bias_is_judged_with_one() -> None:
    report = check(sabotages.NeedsAShift, ["values", "behaviour"])
    assert report.passed, report
    assert report.dtypes == dict.fromkeys(DTYPES, True)
    (case,) = (case for case in report.cases if case.name == "no bias")
    assert "a shift, please" in case.refused["float32"]


def test_an_output_of_another_shape_is_a_failure() -> None:
    class Shorter(sabotages.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)[..., :1] if x.shape[-1] == 768 else super().forward(x)

    report = check(Shorter, ["width 768", "ordinary rows"])
    assert report.dtypes["float32"] is False
    assert "Shorter must return one tensor of its input's shape (24, 768), got (24, 1) (" in report.diagnoses[0]


@pytest.mark.parametrize("norm", ["fused", "textbook", *sabotages.CORRECT])
def test_no_probe_blames_a_correct_norm(norm: type[nn.Module] | str) -> None:
    for seed in range(3):
        subject = Subject(norm, torch.device("cpu"), seed=seed)
        for dtype in (torch.float32, *HALVES):
            assert agreed(subject, dtype) == structure(subject, dtype) == symptoms(subject, dtype) == []
        for part, shape in itertools.product(("input", "weight", "bias"), BACKWARD_PROBES.values()):
            assert wrong_gradient(subject, torch.float32, shape, part) == []
