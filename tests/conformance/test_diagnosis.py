"""Every mistake of a formula has its name, and a correct norm is never blamed for one."""

import itertools
from typing import Any

import named_mistakes
import pytest
import sabotages
import torch
from kit import check, norm_with
from torch import Tensor, nn

from minigpt import LayerNorm
from minigpt.conformance.backward import BACKWARD_PROBES, wrong_gradient
from minigpt.conformance.mistakes import BACKWARD, SUMS
from minigpt.conformance.probes import agreed, structure, symptoms
from minigpt.conformance.subject import Subject
from minigpt.norms.formulas import tables
from minigpt.norms.variants import RMSNorm
from minigpt.precision import DTYPES, HALVES

# torch.compile would trace the shape checks, and some norms here return other shapes on purpose
pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("unchecked")]

CPU = torch.device("cpu")


FIRST = ["ordinary rows", "3-D input", "deviation near*"]
GRADIENTS = ["ordinary rows", "gradients, ordinary rows"]


@pytest.mark.parametrize("name", named_mistakes.FORWARDS)
def test_a_mistake_of_the_formula_has_its_name(name: str) -> None:
    report = check(norm_with(named_mistakes.FORWARDS[name]), FIRST)
    assert not report.passed
    assert [mistake.sentence for mistake in report.mistakes] == [name]


@pytest.mark.parametrize("name", named_mistakes.RMS_FORWARDS)
def test_a_mistake_of_the_formula_of_an_rms_norm_has_its_name(name: str) -> None:
    report = check(norm_with(named_mistakes.RMS_FORWARDS[name], RMSNorm), FIRST, kind="rms_norm")
    assert not report.passed
    assert [mistake.sentence for mistake in report.mistakes] == [name]


def gradient_mistakes(change: named_mistakes.Change, kind: str = "layer_norm") -> list[str]:
    """Return what the kit finds in a right forward whose backward pass has one changed part, at whatever dtypes."""

    def forward(norm: Any, x: Tensor) -> Tensor:
        return sabotages.Backward.apply(x, norm.weight, norm.bias, norm.eps, change)  # pyright: ignore

    base = LayerNorm if kind == "layer_norm" else RMSNorm
    report = check(norm_with(forward, base), GRADIENTS, kind=kind)
    return [mistake.sentence.partition(", at float")[0] for mistake in report.mistakes]


@pytest.mark.parametrize(
    ("start", "changes"),
    [
        (sabotages.OF_INPUT, named_mistakes.INPUT_GRADIENTS),
        (sabotages.OF_WEIGHT, named_mistakes.WEIGHT_GRADIENTS),
        (sabotages.OF_BIAS, named_mistakes.BIAS_GRADIENTS),
    ],
    ids=["input", "weight", "bias"],
)
def test_a_mistake_of_a_gradient_has_its_name(start: str, changes: dict[str, named_mistakes.Change]) -> None:
    for name, change in changes.items():
        assert gradient_mistakes(change) == [f"{start}{name}"]


def test_a_mistake_of_a_gradient_of_an_rms_norm_has_its_name() -> None:
    with sabotages.as_rms_norms():
        for name, change in named_mistakes.RMS_INPUT_GRADIENTS.items():
            assert gradient_mistakes(change, "rms_norm") == [f"{sabotages.OF_INPUT}{name}"]


@pytest.mark.parametrize(
    ("names", "of_parts"),
    [
        (named_mistakes.FORWARDS, [*tables("layer_norm").values()]),
        (named_mistakes.FORWARDS | named_mistakes.RMS_FORWARDS, [*tables("rms_norm").values()]),
        (named_mistakes.INPUT_GRADIENTS, BACKWARD["layer_norm"]),
        (named_mistakes.INPUT_GRADIENTS | named_mistakes.RMS_INPUT_GRADIENTS, BACKWARD["rms_norm"]),
        (named_mistakes.WEIGHT_GRADIENTS, [SUMS["weight"]]),
        (named_mistakes.BIAS_GRADIENTS, [SUMS["bias"]]),
    ],
    ids=["LayerNorm", "RMSNorm", "input", "input of an RMSNorm", "weight", "bias"],
)
def test_every_name_is_that_of_a_norm_here(names: dict[str, Any], of_parts: list[dict[str, Any]]) -> None:
    for table in of_parts:
        assert table.keys() - {""} <= names.keys()


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
    report = check(norm_with(forward), ["ordinary rows", "gradients, ordinary rows"])
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
    report = check(norm_with(forward, name="Shorter"), ["width 768", "ordinary rows"])
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
