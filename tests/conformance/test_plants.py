"""A planted fault fails and is named, whatever it looks at, and nothing else is."""

import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from kit import check, failed_dtypes, norm_with
from plants import EVERY, Plant, is_answer, plants, reads_behind
from sabotages import exact
from torch import Tensor, nn

from minigpt import LayerNorm, norms

pytestmark = pytest.mark.usefixtures("unchecked")  # some return other shapes on purpose


@pytest.mark.parametrize(
    "plant",
    [pytest.param(one, id=one.name, marks=[pytest.mark.thorough] if one.is_slow else []) for one in plants()],
)
def test_a_planted_fault_fails_and_is_named_and_nothing_else_is(plant: Plant) -> None:
    report = check(plant.norm, plant.cases)
    assert not report.passed
    assert plant.fails is None or failed_dtypes(report) == plant.fails
    for message, start in zip(report.diagnoses, plant.expected, strict=True):
        assert message.startswith(start), report.diagnoses


@pytest.mark.thorough
def test_no_call_of_a_case_finds_the_answer() -> None:
    """A correct norm that looks for its answer finds what it returned itself, and no truth."""
    hits = []

    class Looks(LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            wide = [one for one in gc.get_objects() if type(one) is Tensor and one.dtype == torch.float64]
            hits.extend(one.shape for one in wide if x.dtype != torch.float64 and is_answer(self, x, one))
            return exact(self, x)

    check(Looks, ["any mode", "gradients, ordinary rows"])
    assert hits == []


@pytest.mark.parametrize("dims", [3, 4])
def test_what_is_read_behind_rows_of_many_dimensions_is_not_seen(dims: int) -> None:
    assert check(norm_with(reads_behind(dims)), ["values", "layouts"]).passed


class WithCopies(nn.Module):
    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size)), eps
        self.copies = self.weight.detach().clone(), self.bias.detach().clone()


def ignores_scale(n: WithCopies, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=n.eps) + n.bias


def copies_its_parameters(n: WithCopies, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], *(copy.to(x) for copy in n.copies), eps=n.eps)


@pytest.mark.parametrize(
    ("forward", "mistake"),
    [(ignores_scale, "no scale"), (copies_its_parameters, "no scale and no shift")],
)
def test_a_class_that_ignores_its_weight_is_no_layer_norm(forward: Callable[..., Tensor], mistake: str) -> None:
    norm = type("Norm", (WithCopies,), {"forward": forward})
    report = check(norm, ["ordinary rows"])
    assert (failed_dtypes(report), report.diagnoses) == (EVERY, [mistake])
    assert "Norm ignores its weight" in report.notes[0]
    assert norms.build(norm, 8).weight is not None


def test_a_width_that_a_norm_refuses_is_a_note() -> None:
    def forward(norm: LayerNorm, x: Tensor) -> Tensor:
        if x.shape[-1] % 8:
            raise ValueError("the width must be a multiple of 8")
        return exact(norm, x)

    report = check(norm_with(forward), ["widths", "ordinary rows"])
    assert report.passed, report
    assert report.diagnoses == []
    assert "it refuses widths that no GPT-2 has, 2, 3, 31 and " in report.notes[0]
    assert "the width must be a multiple of 8" in report.notes[0]
    needed = norm_with(lambda n, x: forward(n, x[..., :7]) if x.shape[-1] == 768 else exact(n, x))
    assert not check(needed, ["widths"]).passed
