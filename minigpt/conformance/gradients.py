"""Cases of gradients, against float64 autograd."""

from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.conformance.case import Case, Measurement, worst, worst_element
from minigpt.conformance.rows import ROW_KINDS, RowKind, transposed
from minigpt.conformance.subject import Candidate, Subject
from minigpt.conformance.truth import PRECISIONS, Truth
from minigpt.errors import NormError
from minigpt.norms.add import parts_of
from minigpt.placement import DTYPES

REASON = "the bound on values, once for the standardized row and once for its product with the incoming gradient"


class Setting(NamedTuple):
    """One setting of a backward pass.

    Attributes:
        shape: of the input, (..., width).
        of_input, of_output: lay out input and incoming gradient in memory, (rows, width) -> (rows, width).
        frozen: the name of the tensor that takes no gradient: "input" or "weight".
    """

    tests: str
    shape: tuple[int, ...] = (12, 64)
    of_input: Callable[[Tensor], Tensor] = lambda x: x
    of_output: Callable[[Tensor], Tensor] = lambda dy: dy
    frozen: str = ""


MANY = "every row and column, in sizes that no block of a kernel divides"
FROZEN = "a frozen tensor takes no gradient, and the others still get theirs"
SETTINGS = {
    "dy expanded": Setting(
        "the backward pass follows the strides of the incoming gradient", of_output=lambda dy: dy[:1, :1].expand_as(dy)
    ),
    "input transposed": Setting("the backward pass follows the strides of the input", of_input=transposed),
    "as tokens": Setting("rows of several dimensions, as a model has them, in training", (2, 6, 64)),
    "1,000 rows": Setting(MANY, (1000, 64)),
    "width 1001": Setting(MANY, (7, 1001)),
    "frozen weight": Setting(FROZEN, frozen="weight"),
    "frozen input": Setting(FROZEN, frozen="input"),
}


def _row_kind(kind: RowKind, subject: Subject, dtype: torch.dtype) -> Measurement:
    candidate = subject.candidate(768, dtype, weights=kind.weights)
    x = subject.put(kind.rows(24, 768, subject.generator, dtype), dtype)
    return _against_truth(candidate, candidate, x, subject.rows(24, 768, dtype=dtype))


def _in_setting(setting: Setting, subject: Subject, dtype: torch.dtype) -> Measurement:
    width = setting.shape[-1]
    candidate = subject.candidate(width)
    candidate.module.train()
    x, dy = (subject.rows(*setting.shape, dtype=dtype).view(-1, width) for _ in range(2))
    return _against_truth(
        candidate,
        lambda rows: candidate(rows.view(setting.shape)).reshape(rows.shape),
        setting.of_input(x),
        setting.of_output(dy),
        frozen={setting.frozen},
    )


def residual_added(subject: Subject, dtype: torch.dtype) -> Measurement:
    candidate = subject.candidate(64, dtype)
    candidate.module.train()
    x, dy = (subject.rows(12, 64, dtype=dtype) for _ in range(2))
    true = candidate.gradient_truth(x, dy)
    back = true["input"].values + dy.cpu().double()
    true["input"] = Truth(back, true["input"].bound + 2 * PRECISIONS[dtype].result * back.abs())

    def total_and_norm(rows: Tensor) -> Tensor:
        total, y = candidate.add_norm(*parts_of(rows))
        return total + y

    return _measured(gradients(candidate, total_and_norm, x, dy), true)


@torch.enable_grad()
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
        NormError: if one of the others gets no gradient.
    """
    leaves = {"input": x.detach().clone(), **candidate.parameters}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name not in frozen)
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    y = forward(leaves["input"])
    if not y.requires_grad:
        raise NormError("no gradient flows through it")
    found = torch.autograd.grad(y, list(wanted.values()), dy.to(y.dtype), allow_unused=True)
    by_name = {name: gradient for name, gradient in zip(wanted, found, strict=True) if gradient is not None}
    if missing := sorted(wanted.keys() - by_name.keys()):
        raise NormError(f"no gradient reaches its {missing[0]}")
    return by_name


def _against_truth(
    candidate: Candidate, forward: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor, *, frozen: Collection[str] = ()
) -> Measurement:
    true = candidate.gradient_truth(x, dy)
    return _measured(gradients(candidate, forward, x, dy, frozen=frozen), true)


def _measured(found: dict[str, Tensor], true: dict[str, Truth]) -> Measurement:
    return worst({name: worst_element(tensor, *true[name]) for name, tensor in found.items()})


GRADIENT_CASES = [
    *(
        Case(f"gradients, {kind.name}", "gradients", kind.tests, REASON, partial(_row_kind, kind))
        for kind in ROW_KINDS
        if kind.magnitudes is None
    ),
    *(
        Case(f"gradients, {name}", "gradients", "ordinary rows", REASON, partial(_row_kind, ROW_KINDS[0]), (dtype,))
        for name, dtype in DTYPES.items()
        if name != "float32"
    ),
    *(
        Case(f"gradients, {name}", "gradients", setting.tests, REASON, partial(_in_setting, setting))
        for name, setting in SETTINGS.items()
    ),
    Case(
        "gradients, residual added too",
        "gradients",
        "gradients through add_norm, if it has one, by its sum and by its norm",
        REASON + ", and the addition of what comes back by the sum",
        residual_added,
        (torch.float32, torch.bfloat16),
    ),
]
