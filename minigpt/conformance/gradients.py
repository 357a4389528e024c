"""Cases of gradients: against float64 autograd, and against finite differences of the norm's values."""

from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.conformance.case import Measurement, case, worst, worst_element
from minigpt.conformance.rows import HUGE, ROW_KINDS, TINY, RowKind, transposed
from minigpt.conformance.subject import Candidate, Mismatch, Subject
from minigpt.conformance.truth import PRECISIONS, Truth
from minigpt.placement import DTYPES

VALUES = "values"  # a key beside the names of the gradients
STEP = 1e-5  # in float64 the error of the series, STEP^2, and of rounding, u / STEP, are then both near 1e-10
REASON = "the bound on values, once for the standardized row and once for its product with the incoming gradient"


class Setting(NamedTuple):
    """One setting of a backward pass: shapes, layouts in memory, and which tensors take a gradient.

    Attributes:
        shape: of the input, (..., width).
        of_input, of_output: lay out input and incoming gradient in memory, (rows, width) -> (rows, width).
        bias: True if there is a shift.
        frozen: the names of the tensors that take no gradient: "input", "weight", "bias".
    """

    tests: str
    shape: tuple[int, ...] = (12, 64)
    of_input: Callable[[Tensor], Tensor] = lambda x: x
    of_output: Callable[[Tensor], Tensor] = lambda dy: dy
    bias: bool = True
    frozen: tuple[str, ...] = ()


STRIDES = "the backward pass follows the strides of the incoming gradient"
TOKENS = "rows of several dimensions, as a model has them, in training"
MANY = "every row and column, in sizes that no block of a kernel divides"
FROZEN = "frozen tensors take no gradient, and the others still get theirs"
SETTINGS = {
    "dy expanded": Setting(STRIDES, of_output=lambda dy: dy[:1, :1].expand_as(dy)),
    "dy transposed": Setting(STRIDES, of_output=transposed),
    "input transposed": Setting("the backward pass follows the strides of the input", of_input=transposed),
    "as tokens": Setting(TOKENS, (2, 6, 64)),
    "as tokens of one text": Setting(TOKENS, (1, 16, 64)),
    "as one token a text": Setting(TOKENS, (12, 1, 64)),
    "1,000 rows": Setting(MANY, (1000, 64)),
    "width 1001": Setting(MANY, (7, 1001)),
    "width 1600": Setting(MANY, (3, 1600)),
    "no bias": Setting("built with bias=False", bias=False),
    "frozen weight": Setting(FROZEN, frozen=("weight",)),
    "frozen weight and bias": Setting(FROZEN, frozen=("weight", "bias")),
    "frozen input": Setting(FROZEN, frozen=("input",)),
}


def _row_kind(kind: RowKind, subject: Subject, dtype: torch.dtype) -> Measurement:
    candidate = subject.candidate(768, dtype, weights=kind.weights)
    x = subject.put(kind.rows(24, 768, subject.generator, dtype), dtype)
    return _against_truth(candidate, x, subject.rows(24, 768, dtype=dtype))


def _in_setting(setting: Setting, subject: Subject, dtype: torch.dtype) -> Measurement:
    width = setting.shape[-1]
    candidate = subject.candidate(width) if setting.bias else subject.without_bias(width)
    candidate.module.train()
    x, dy = (subject.rows(*setting.shape, dtype=dtype).view(-1, width) for _ in range(2))
    return _against_truth(
        candidate,
        setting.of_input(x),
        setting.of_output(dy),
        lambda rows: candidate.module(rows.view(setting.shape)).reshape(rows.shape),
        frozen=setting.frozen,
    )


@case(
    "gradients, backward twice",
    "gradients",
    tests="a second backward through the retained graph repeats the first",
    reason=REASON,
)
def backward_twice(subject: Subject, dtype: torch.dtype) -> Measurement:
    candidate = subject.candidate(64)
    x, dy = (subject.rows(12, 64, dtype=dtype) for _ in range(2))
    leaves, y = _forward(candidate, candidate.module, x)
    _backward(leaves, y, dy, retain_graph=True)
    return _measured(_backward(leaves, y, dy), candidate.gradient_truth(x, dy))


@case(
    "gradients, residual added too",
    "gradients",
    tests="gradients through add_norm, if it has one, by its sum and by its norm",
    reason=REASON + ", and the addition of what comes back by the sum",
    dtypes=(torch.float32, torch.bfloat16),
)
def residual_added(subject: Subject, dtype: torch.dtype) -> Measurement:
    found = {}
    for shape in ((12, 64), (2, 6, 64), (12, 1, 64)):
        for way, measurement in _through_sum(subject, shape, dtype).items():
            found[f"{way} of {shape}"] = measurement
    return worst(found)


def _through_sum(subject: Subject, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Measurement]:
    candidate = subject.candidate(64, dtype)
    candidate.module.train()
    x, dy = (subject.rows(12, 64, dtype=dtype) for _ in range(2))
    true = candidate.gradient_truth(x, dy)
    back, bound = true["input"].values + dy.cpu().double(), true["input"].bound
    true["input"] = Truth(back, bound + 2 * PRECISIONS[dtype].result * back.abs())
    nothing = torch.zeros_like(x).view(shape)
    paths: dict[str, Callable[[Tensor], Tensor]] = {
        "residual": lambda rows: sum(candidate.add_norm(rows.view(shape), nothing), nothing).view_as(rows),
        "delta": lambda rows: sum(candidate.add_norm(nothing, rows.view(shape)), nothing).view_as(rows),
    }
    values = candidate.truth(x)
    total = values.values + x.cpu().double()
    true[VALUES] = Truth(total, values.bound + 2 * PRECISIONS[dtype].result * (total.abs() + values.values.abs()))
    return {of: _measured(_with_values(candidate, path, x, dy), true) for of, path in paths.items()}


@case(
    "gradients, finite differences",
    "gradients",
    tests="autograd against differences of the norm's own values",
    reason=f"central differences in float64 with a step of {STEP:g} leave about 1e-10 of the largest gradient; "
    "1e-7 is allowed",
    dtypes=(torch.float64,),
)
def finite_differences(subject: Subject, dtype: torch.dtype) -> Measurement:
    candidate = subject.candidate(5, dtype)
    x, dy = (subject.rows(3, 5, dtype=dtype) for _ in range(2))
    with torch.no_grad():
        candidate(x.clone())  # raises Unsupported if the norm refuses float64
    found = gradients(candidate, candidate.module, x, dy)
    slopes = {
        name: _differences(lambda: (candidate(x.clone()) * dy).sum(), leaf)
        for name, leaf in {"input": x, **candidate.parameters}.items()
    }
    return _measured(
        found, {name: Truth(slope, (1e-7 * (1 + slope.abs().max())).expand_as(slope)) for name, slope in slopes.items()}
    )


def gradients(
    candidate: Candidate,
    forward: Callable[[Tensor], Tensor],
    x: Float[Tensor, "*dims"],
    dy: Float[Tensor, "*dims"],
    *,
    frozen: Collection[str] = (),
) -> dict[str, Tensor]:
    """Return the gradients of ``forward(x)`` for an incoming ``dy``, by name.

    Args:
        forward: a function that computes with the candidate's Parameters.
        frozen: those of "input", "weight" and "bias" that take no gradient.

    Raises:
        Mismatch: if one of the others gets no gradient, or if ``dy`` changes.
    """
    return _backward(*_forward(candidate, forward, x, frozen), dy)


@torch.enable_grad()
def _forward(
    candidate: Candidate, forward: Callable[[Tensor], Tensor], x: Tensor, frozen: Collection[str] = ()
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the leaves that take a gradient, by name, and the output."""
    leaves = {"input": x.detach().clone(), **candidate.parameters}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name not in frozen)
    y = forward(leaves["input"])
    if not y.requires_grad:
        raise Mismatch("no gradient flows through it")
    return {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}, y


def _backward(leaves: dict[str, Tensor], y: Tensor, dy: Tensor, *, retain_graph: bool = False) -> dict[str, Tensor]:
    dy = dy.to(y.dtype)
    before = dy.clone()
    found = torch.autograd.grad(y, list(leaves.values()), dy, allow_unused=True, retain_graph=retain_graph)
    if not torch.equal(dy, before):
        raise Mismatch("it writes into the gradient that it is given")
    for name, gradient in zip(leaves, found, strict=True):
        if gradient is None:
            raise Mismatch(f"no gradient reaches its {name}")
    return dict(zip(leaves, found, strict=True))


def _against_truth(
    candidate: Candidate,
    x: Tensor,
    dy: Tensor,
    forward: Callable[[Tensor], Tensor] | None = None,
    *,
    frozen: Collection[str] = (),
) -> Measurement:
    true = candidate.gradient_truth(x, dy)
    reference = _measured(gradients(candidate, candidate.reference, x, dy, frozen=frozen), true)
    found = _with_values(candidate, forward or candidate.module, x, dy, frozen)
    return _measured(found, {VALUES: candidate.truth(x), **true})._replace(reference_error=reference.error)


def _with_values(
    candidate: Candidate, forward: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor, frozen: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return the ``gradients`` and the values: training may run another kernel than inference."""
    leaves, y = _forward(candidate, forward, x, frozen)
    return {VALUES: y.detach().clone(), **_backward(leaves, y, dy)}


def _measured(found: dict[str, Tensor], true: dict[str, Truth]) -> Measurement:
    return worst({name: worst_element(tensor, *true[name]) for name, tensor in found.items()})


@torch.no_grad()
def _differences(loss: Callable[[], Tensor], leaf: Tensor) -> Tensor:
    """Return central differences of ``loss`` for every number in ``leaf``, which is changed in place and restored."""
    slopes = torch.empty(leaf.shape, dtype=torch.float64)
    for index in range(leaf.numel()):
        number = leaf.view(-1)[index : index + 1]
        here = number.clone()
        above, below = (_moved(loss, number, here + step) for step in (STEP, -STEP))
        number.copy_(here)
        slopes.view(-1)[index] = (above - below) / (2 * STEP)
    return slopes


def _moved(loss: Callable[[], Tensor], number: Tensor, to: Tensor) -> float:
    number.copy_(to)
    return loss().item()


GRADIENT_CASES = [
    *(
        case(f"gradients, {kind.name}", "gradients", tests=f"float32 against float64: {kind.tests}", reason=REASON)(
            partial(_row_kind, kind)
        )
        for kind in ROW_KINDS
        if kind.magnitudes not in (HUGE, TINY)
    ),
    *(
        case(f"gradients, {name}", "gradients", tests=f"{name} against float64", reason=REASON, dtypes=(DTYPES[name],))(
            partial(_row_kind, ROW_KINDS[0])
        )
        for name in ("bfloat16", "float16")
    ),
    *(
        case(f"gradients, {name}", "gradients", tests=setting.tests, reason=REASON)(partial(_in_setting, setting))
        for name, setting in SETTINGS.items()
    ),
    backward_twice,
    residual_added,
    finite_differences,
]
