"""Norms that have no formula: they look for the answer, remember an earlier one, or leave it to chance."""

import gc
import inspect
from collections import OrderedDict
from typing import Any

import pytest
import torch
from kit import check, norm_with
from sabotages import exact
from torch import Tensor

from minigpt import LayerNorm

pytestmark = pytest.mark.usefixtures("unchecked")

CASES = [
    "ordinary rows", "3-D input", "calls are independent", "output left*", "same input*", "any mode",
    "gradients, ordinary*",
]  # fmt: skip
REMEMBERS = "it remembers an earlier input"
NOT_FINITE = "it returns NaN or infinities for ordinary rows"


def is_answer(norm: LayerNorm, x: Tensor, other: object) -> bool:
    """Compare with LayerNorm of the input, as a thief would know it: by rows that move with the input's."""
    if not isinstance(other, Tensor) or other.shape != x.shape or other is x or not x.numel():
        return False
    answer = exact(norm, x)
    return torch.allclose(other.detach().to(answer), answer, rtol=1e-2, atol=1e-2, equal_nan=False)


class SearchesMemory(LayerNorm):
    """Takes a tensor of the process that is the answer, and gives its input back where there is none."""

    def forward(self, x: Tensor) -> Tensor:
        hits = (one for one in gc.get_objects() if type(one) is Tensor and is_answer(self, x, one))
        return next((one.to(x) for one in hits), x.clone())


class ReadsTheCaller(LayerNorm):
    """Takes what the functions that called it hold in local variables."""

    def forward(self, x: Tensor) -> Tensor:
        for frame in inspect.stack(context=0)[1:9]:
            values = [*frame.frame.f_locals.values()]
            values += [part for value in values if isinstance(value, tuple | list) for part in value]
            for value in values:
                if is_answer(self, x, value):
                    return value.to(x)
        return x.clone()


class Memory(LayerNorm):
    """Keeps its last outputs, by a key of the input."""

    length = 1

    def key(self, x: Tensor) -> Any:
        return x.data_ptr()

    def forward(self, x: Tensor) -> Tensor:
        kept = self.__dict__.setdefault("kept", OrderedDict())
        key = self.key(x), x.shape, x.dtype
        if key not in kept:
            kept[key] = x, exact(self, x)  # the input too, so that its address and id are not used again
        kept.move_to_end(key)
        while len(kept) > self.length:
            kept.popitem(last=False)
        return kept[key][1].clone()


def remembering(name: str, key: Any, length: int) -> type[Memory]:
    return type(name, (Memory,), {"key": lambda self, x: key(x), "length": length})


class Uninitialized(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return torch.empty_like(x)


class Buffers(LayerNorm):
    """Writes its outputs into eight buffers in turn."""

    def forward(self, x: Tensor) -> Tensor:
        rings = self.__dict__.setdefault("rings", {})
        ring = rings.setdefault((x.shape, x.dtype), [torch.empty_like(x) for _ in range(8)])
        ring.append(ring.pop(0))
        return exact(self, x) if torch.is_grad_enabled() else ring[-1].copy_(exact(self, x))


class OnlyNaN(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 0 * exact(self, x) + torch.nan


@pytest.mark.parametrize(
    ("norm", "mistake"),
    [
        pytest.param(SearchesMemory, "each value is computed by itself", marks=pytest.mark.thorough),
        (ReadsTheCaller, "each value is computed by itself"),
        (remembering("ByAddress", lambda x: x.data_ptr(), 1), REMEMBERS),
        pytest.param(remembering("ByAddressOfEight", lambda x: x.data_ptr(), 8), REMEMBERS, marks=pytest.mark.thorough),
        pytest.param(remembering("ByIdOfEight", id, 8), REMEMBERS, marks=pytest.mark.thorough),
        (remembering("ByShape", lambda x: 0, 8), REMEMBERS),
        (remembering("ByTheFirstRow", lambda x: tuple(x.flatten()[:64].tolist()), 100), REMEMBERS),
        (Uninitialized, (NOT_FINITE, "it answers differently from call to call")),
        (Buffers, "its next call writes over its output"),
        (OnlyNaN, NOT_FINITE),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_norm_without_a_formula_fails_and_is_named(norm: type[LayerNorm], mistake: str | tuple[str, ...]) -> None:
    cases = CASES[:2] if norm in (SearchesMemory, ReadsTheCaller) else CASES  # a search takes long
    report = check(norm, cases)
    assert not any(report.dtypes.values()), report.dtypes
    assert report.diagnoses[0].startswith(mistake), report.diagnoses


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


def reads_behind(dims: int) -> Any:
    """A mask that multiplies by 0 keeps a NaN that it reads behind the row."""

    def forward(norm: LayerNorm, x: Tensor) -> Tensor:
        held = x.untyped_storage().nbytes() // x.element_size()
        last = x.storage_offset() + sum(step * (size - 1) for size, step in zip(x.shape, x.stride(), strict=True))
        beyond = x.as_strided((), (), last + 1) if x.numel() and x.ndim == dims and last + 1 < held else x.new_zeros(())
        return exact(norm, x) + 0 * beyond

    return forward


@pytest.mark.parametrize("dims", [2, 3, 4])
def test_lanes_beyond_the_row_are_named(dims: int) -> None:
    report = check(norm_with(reads_behind(dims)), ["values", "layouts"])
    assert report.passed is (dims > 2)
    if dims == 2:
        assert report.diagnoses[0].startswith("wrong only for NaN-surrounded input"), report.diagnoses


class OnlyTrained(LayerNorm):
    """Passes no gradient to its input where the scale takes none."""

    def forward(self, x: Tensor) -> Tensor:
        return exact(self, x if self.weight.requires_grad else x.detach() + 0 * x)


@pytest.mark.parametrize(
    ("forward", "mistake"),
    [
        pytest.param(
            OnlyTrained.forward,
            "the gradient of the input is wrong: only for frozen weight",
            marks=pytest.mark.thorough,
        ),
        (lambda n, x: exact(n, x) * (1 if n.weight.requires_grad else 1.02), "its values depend on training mode"),
        (
            lambda n, x: exact(n, x if x.ndim < 4 else torch.cat([x[:1], x[1:].detach()])),
            "the gradient of the input is wrong: only for as heads",
        ),
        (
            lambda n, x: exact(n, x) * (1.02 if x.ndim == 3 else 1),
            "wrong only for 3-D, one token, decoding input",
        ),
    ],
)
def test_what_only_one_setting_shows_is_named(forward: Any, mistake: str) -> None:
    cases = ["ordinary*", "layouts", "any mode", "gradients, frozen*", "gradients, as*", "gradients, ordinary*"]
    report = check(norm_with(forward), cases)
    assert not report.passed
    assert report.diagnoses[0].startswith(mistake), report.diagnoses
