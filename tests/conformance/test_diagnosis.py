"""Every mistake is named, and a correct norm is never blamed for one."""

import itertools
from typing import Any

import pytest
import sabotages
import torch
from torch import Tensor, nn

from minigpt import LayerNorm
from minigpt.conformance import ConformanceReport, check_norm
from minigpt.conformance.backward import BACKWARD_PROBES, wrong_gradient
from minigpt.conformance.mistakes import BACKWARD, SUMS, TABLES, deviation_of, formula, slope, true_norm
from minigpt.conformance.probes import agreed, closest_formula, structure, symptoms
from minigpt.conformance.subject import Subject
from minigpt.precision import DTYPES, HALVES

# torch.compile would trace the shape checks, and some norms here return other shapes on purpose
pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("unchecked")]

FAST = [
    "width 2", "width 64", "width 1025", "257 rows", "65,537 rows", "batch of 257", "sequence of 1,025", "values",
    "layouts", "behaviour", "gradients, [!0-9wbs]*", "gradients, width 1025", "gradients, 1,025 rows",
]  # fmt: skip
CPU = torch.device("cpu")


def check(norm: Any, cases: str | list[str]) -> ConformanceReport:
    return check_norm(norm, device="cpu", cases=cases, seed=0)


@pytest.mark.parametrize(
    ("norm", "expected"), sabotages.MISTAKES.items(), ids=lambda norm: getattr(norm, "__name__", "")
)
def test_a_mistake_fails_and_is_named_and_nothing_else_is(norm: type[nn.Module], expected: tuple[str, ...]) -> None:
    report = check(norm, "compile" if norm is sabotages.WrongWhenCompiled else FAST)
    assert not report.passed
    for message, start in zip(report.diagnoses, expected, strict=True):
        assert message.startswith(start), report.diagnoses


def names_of(tables: list[Any]) -> list[Any]:
    """The place of each table, and the name of each mistake in it."""
    names = [(at, name) for at, table in enumerate(tables) for name in table if name]
    return [pytest.param(at, name, id=name[:60]) for at, name in names]


def with_one(tables: list[Any], at: int, name: str) -> list[Any]:
    return [table[name if place == at else ""] for place, table in enumerate(tables)]


@pytest.mark.parametrize(("at", "name"), names_of(TABLES[True]))
def test_each_formula_of_the_tables_is_named_as_itself_and_as_nothing_else(at: int, name: str) -> None:
    def forward(norm: Any, x: Tensor) -> Tensor:
        parts = with_one(TABLES[True], at, name)
        return formula(x.double(), norm.weight.double(), norm.bias.double(), parts).to(x.dtype)

    norm = type("Norm", (LayerNorm,), {"forward": forward})
    assert closest_formula(Subject(norm, CPU), torch.float32, (4, 6, 64)) == [name]


class OfTables(torch.autograd.Function):
    """LayerNorm, with functions of (dy, x, weight) for the gradients of input and weight, in float64 rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, of_input: Any, of_weight: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.of_input, ctx.of_weight = of_input, of_weight
        return nn.functional.layer_norm(x, weight.shape, weight, bias, 1e-5)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        rows = dy.flatten(0, -2).double(), x.flatten(0, -2).double()
        rows = *rows, true_norm(rows[1], True), weight.double()
        dx, dweight = ctx.of_input(*rows).view(x.shape).to(x.dtype), ctx.of_weight(*rows).sum(0).to(x.dtype)
        return dx, dweight, rows[0].sum(0).to(x.dtype), None, None


def gradient_of(parts: list[Any]) -> Any:
    return lambda dy, x, s, weight: slope(parts, x, dy, weight, True) / deviation_of(x, True)


def mistake_of(part: str, of_input: Any = None, of_weight: Any = SUMS["weight"][""]) -> list[str] | None:
    right = gradient_of(with_one(BACKWARD[True], -1, ""))
    forward = lambda n, x: OfTables.apply(x, n.weight, n.bias, of_input or right, of_weight)  # noqa: E731
    norm = type("Norm", (LayerNorm,), {"forward": forward})
    return wrong_gradient(Subject(norm, CPU), torch.float32, (4, 6, 64), part)


@pytest.mark.parametrize(("at", "name"), names_of(BACKWARD[True]))
def test_each_gradient_of_the_input_of_the_tables_is_named(at: int, name: str) -> None:
    assert mistake_of("input", gradient_of(with_one(BACKWARD[True], at, name))) == [name]


def test_each_gradient_of_the_weight_of_the_tables_is_named() -> None:
    assert mistake_of("input") == mistake_of("weight") == mistake_of("bias") == []
    for name, terms in SUMS["weight"].items():
        assert mistake_of("weight", of_weight=terms) == [name] * bool(name)


@pytest.mark.parametrize(
    ("part", "factor", "dtype", "named"),
    [
        ("input", 0.5, "float32", "it is multiplied by 0.5"),
        ("input", -1.0, "bfloat16", "it has the wrong sign"),
        ("weight", 1.1, "bfloat16", "it is multiplied by 1.1"),
        ("weight", 0.0, "float32", "it is 0"),
        ("bias", 2.0, "float32", "it is multiplied by 2"),
        ("bias", 0.9, "bfloat16", "it is multiplied by 0.9"),
    ],
)
def test_a_factor_of_a_gradient_is_named(part: str, factor: float, dtype: str, named: str) -> None:
    key = {"input": "times", "weight": "sum", "bias": "sum_bias"}[part]
    change = {key: factor if part == "input" else lambda terms: factor * terms.sum(0)}
    forward = lambda n, x: sabotages.Backward.apply(  # noqa: E731
        x, n.weight, n.bias, n.eps, lambda p: change if x.dtype == DTYPES[dtype] else {}
    )
    report = check(type("Norm", (LayerNorm,), {"forward": forward}), ["ordinary rows", "gradients, ordinary rows"])
    assert report.diagnoses == [f"the gradient of the {part} is wrong: {named}, at {dtype}"]


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


def test_a_norm_that_needs_a_bias_is_judged_with_one() -> None:
    report = check(sabotages.NeedsAShift, ["values", "behaviour"])
    assert report.passed, report
    assert report.dtypes == dict.fromkeys(DTYPES, True)
    (case,) = (case for case in report.cases if case.name == "no bias")
    assert "a shift, please" in case.refused["float32"]


def test_an_output_of_another_shape_is_a_failure() -> None:
    forward = lambda n, x: sabotages.exact(n, x)[..., : 1 if x.shape[-1] == 768 else None]  # noqa: E731
    report = check(type("Shorter", (LayerNorm,), {"forward": forward}), ["width 768", "ordinary rows"])
    assert report.dtypes["float32"] is False
    assert "Shorter must return one tensor of its input's shape (24, 768), got (24, 1) (" in report.diagnoses[0]


@pytest.mark.parametrize("norm", ["fused", "textbook", *sabotages.CORRECT])
def test_no_probe_blames_a_correct_norm(norm: type[nn.Module] | str) -> None:
    for seed in range(3):
        subject = Subject(norm, CPU, seed=seed)
        for dtype in (torch.float32, *HALVES):
            assert agreed(subject, dtype) == structure(subject, dtype) == symptoms(subject, dtype) == []
        for part, shape in itertools.product(("input", "weight", "bias"), BACKWARD_PROBES.values()):
            assert wrong_gradient(subject, torch.float32, shape, part) == []
