"""Cases of gradient: against float64 autograd, and against finite differences of the norm's own values."""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.lab.conformance.case import Measurement, case, worst, worst_element
from minigpt.lab.conformance.rows import HUGE, ROW_KINDS, TINY, RowKind, ordinary
from minigpt.lab.conformance.subject import Candidate, Mismatch, Subject
from minigpt.lab.conformance.truth import PRECISIONS, Truth, gradient_truth

STEP = 1e-5  # in float64 the rest of the series, STEP^2, and the rounding, u / STEP, are then both near 1e-10
REASON = "the bound on values, once for the standardized row and once for its product with the incoming gradient"

# What arrives from above as other layers hand it down: (rows, width) -> (rows, width)
ARRIVALS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda dy: dy[:1, :1].expand_as(dy),
    "transposed": lambda dy: dy.t().contiguous().t(),
}


def _row_kind(kind: RowKind, dtype: torch.dtype, subject: Subject) -> Measurement:
    candidate = subject.candidate(768, dtype, weights=kind.weights)
    x = subject.put(kind.rows(24, 768, subject.generator, dtype), dtype)
    return _against_truth(candidate, x, subject.put(ordinary(24, 768, subject.generator), dtype))


def _arrival(arrive: Callable[[Tensor], Tensor], subject: Subject) -> Measurement:
    x, dy = (subject.put(ordinary(12, 64, subject.generator)) for _ in range(2))
    return _against_truth(subject.candidate(64), x, arrive(dy))


@case(
    "gradients, as tokens",
    "gradients",
    tests="rows of several dimensions, as a model has them, in training",
    reason=REASON,
)
def as_tokens(subject: Subject) -> Measurement:
    candidate = subject.candidate(64)
    candidate.module.train()
    x, dy = (subject.put(ordinary(12, 64, subject.generator)) for _ in range(2))
    return _against_truth(candidate, x, dy, lambda rows: candidate.module(rows.view(2, 6, 64)).flatten(0, 1))


@case(
    "gradients, residual added too",
    "gradients",
    tests="what comes back through add_norm, where it has one, by its sum and by its norm",
    reason=REASON + ", and the addition of what comes back by the sum",
)
def residual_added(subject: Subject) -> Measurement:
    candidate = subject.candidate(64)
    x, dy = (subject.put(ordinary(12, 64, subject.generator)) for _ in range(2))
    true = gradient_truth(x, candidate.weight, candidate.bias, candidate.eps, dy)
    back, bound = true["input"].values + dy.cpu().double(), true["input"].bound
    true["input"] = Truth(back, bound + 2 * PRECISIONS[x.dtype].result * back.abs())
    nothing = torch.zeros_like(x)
    paths: dict[str, Callable[[Tensor], Tensor]] = {
        "residual": lambda rows: sum(candidate.add_norm(rows, nothing), nothing),
        "delta": lambda rows: sum(candidate.add_norm(nothing, rows), nothing),
    }
    return worst({of: _measured(gradients(candidate, path, x, dy), true) for of, path in paths.items()})


@case(
    "gradients, finite differences",
    "gradients",
    tests="autograd against differences of the norm's own values",
    reason=f"central differences in float64 with a step of {STEP:g} leave about 1e-10 of the largest gradient; "
    "1e-7 is allowed",
)
def finite_differences(subject: Subject) -> Measurement:
    candidate = subject.candidate(5, torch.float64)
    x, dy = (subject.put(ordinary(3, 5, subject.generator), torch.float64) for _ in range(2))
    with torch.no_grad():
        candidate(x.clone())  # a norm that refuses float64 is not judged here
    found = gradients(candidate, candidate.module, x, dy)
    leaves = {"input": x, "weight": candidate.weight, "bias": candidate.bias}
    slopes = {
        name: _differences(lambda: (candidate(x.clone()) * dy).sum(), leaf)
        for name, leaf in leaves.items()
        if leaf is not None
    }
    return _measured(
        found, {name: Truth(slope, (1e-7 * (1 + slope.abs().max())).expand_as(slope)) for name, slope in slopes.items()}
    )


@torch.enable_grad()
def gradients(
    candidate: Candidate,
    forward: Callable[[Tensor], Tensor],
    x: Float[Tensor, "*dims"],
    dy: Float[Tensor, "*dims"],
) -> dict[str, Tensor]:
    """What ``dy`` brings back through ``forward(x)``, which computes with the candidate's Parameters, by their names.

    Raises:
        Mismatch: nothing comes back to one of them.
    """
    leaves = {"input": x.detach().clone().requires_grad_(), "weight": candidate.weight}
    if candidate.bias is not None:
        leaves["bias"] = candidate.bias
    y = forward(leaves["input"])
    if not y.requires_grad:
        raise Mismatch("no gradient flows through it")
    found = torch.autograd.grad(y, list(leaves.values()), dy.to(y.dtype), allow_unused=True)
    for name, gradient in zip(leaves, found, strict=True):
        if gradient is None:
            raise Mismatch(f"no gradient reaches its {name}")
    return dict(zip(leaves, found, strict=True))


def _against_truth(
    candidate: Candidate, x: Tensor, dy: Tensor, forward: Callable[[Tensor], Tensor] | None = None
) -> Measurement:
    true = gradient_truth(x, candidate.weight, candidate.bias, candidate.eps, dy)
    reference = _measured(gradients(candidate, candidate.reference, x, dy), true)
    found = _measured(gradients(candidate, forward or candidate.module, x, dy), true)
    return found._replace(reference_error=reference.error)


def _measured(found: dict[str, Tensor], true: dict[str, Truth]) -> Measurement:
    return worst({name: worst_element(found[name], *true[name]) for name in true})


@torch.no_grad()
def _differences(loss: Callable[[], Tensor], leaf: Tensor) -> Tensor:
    """Central differences of ``loss`` by every number in ``leaf``, which is moved in place and put back."""
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
            partial(_row_kind, kind, torch.float32)
        )
        for kind in ROW_KINDS
        if kind.magnitudes not in (HUGE, TINY)
    ),
    case("gradients, bfloat16", "gradients", tests="bfloat16 against float64", reason=REASON)(
        partial(_row_kind, ROW_KINDS[0], torch.bfloat16)
    ),
    *(
        case(
            f"gradients, dy {name}", "gradients", tests="strides of the incoming gradient are followed", reason=REASON
        )(partial(_arrival, arrive))
        for name, arrive in ARRIVALS.items()
    ),
    as_tokens,
    residual_added,
    finite_differences,
]
