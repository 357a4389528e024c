"""Cases of the residual addition, of a norm that adds it too: the sum, the norm of that, and the two as they were."""

import itertools

import torch
from torch import Tensor

from minigpt.conformance.case import Measurement, against_truth, case, require_as_finite, same_numbers, worst
from minigpt.conformance.layouts import LAYOUTS
from minigpt.conformance.rows import ROW_KINDS, ordinary, transposed, with_no_numbers
from minigpt.conformance.subject import OTHER_EPS, Candidate, Subject
from minigpt.norms.add import parts_of
from minigpt.placement import DTYPES, dtype_name

# Rows, texts, one token of several texts, one token, and a width that no block fits
SUM_SHAPES = ((12, 768), (3, 4, 64), (12, 1, 64), (1, 1, 64), (5, 1001))
SUM_DTYPES = ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16))


@case(
    "residual added too",
    "behaviour",
    tests="add_norm(residual, delta), where it has one: the very sum, the norm of that, and the two left as they were",
    reason="exactly the sum; of its norm, for each dtype the bound of its ordinary rows",
)
@torch.no_grad()
def residual_added(subject: Subject) -> Measurement:
    found = {}
    for shape, dtypes, training in itertools.product(SUM_SHAPES, SUM_DTYPES, (True, False)):
        candidate = subject.candidate(shape[-1], dtypes[0])
        candidate.module.train(training)
        residual, delta = (subject.rows(*shape, dtype=dtype) for dtype in dtypes)
        given = f"{shape} in {' and '.join(map(dtype_name, dict.fromkeys(dtypes)))}" + ", training" * training
        found |= _sum_and_norm(candidate, residual, delta, given)
        if len(shape) == 2:
            found |= _sum_and_norm(candidate, transposed(residual), transposed(delta), f"{given}, transposed")
    return worst(found)


@case(
    "residual added too, hard rows",
    "behaviour",
    tests="add_norm of every kind of row at every dtype, in every layout, and built with another eps",
    reason="for each dtype and kind its own bound",
)
@torch.no_grad()
def residual_of_hard_rows(subject: Subject) -> Measurement:
    found = {}
    for (name, dtype), kind in itertools.product(DTYPES.items(), ROW_KINDS):
        candidate = subject.candidate(64, dtype, weights=kind.weights)
        x = subject.put(kind.rows(12, 64, subject.generator, dtype), dtype)
        found |= _sum_and_norm(candidate, *parts_of(x), f"{kind.name} in {name}")
    for name, lay in LAYOUTS.items():
        residual, delta = (lay(subject.rows(12, 64)) for _ in range(2))
        found |= _sum_and_norm(subject.candidate(64), residual, delta, f"rows that are {name}")
    if subject.takes_eps:
        x = subject.put(0.05 * ordinary(12, 64, subject.generator))
        found |= _sum_and_norm(subject.candidate(64, eps=OTHER_EPS), *parts_of(x), f"rows with eps={OTHER_EPS:g}")
    return worst(found)


def _sum_and_norm(candidate: Candidate, residual: Tensor, delta: Tensor, given: str) -> dict[str, Measurement]:
    before, expected = (residual.clone(), delta.clone()), residual + delta
    total, y = candidate.add_norm(residual, delta)
    return {
        f"the residual after it, {given}": same_numbers(residual, before[0]),
        f"the delta after it, {given}": same_numbers(delta, before[1]),
        f"the sum of {given}": same_numbers(total, expected),
        f"the norm of {given}": against_truth(candidate, expected, y),
    }


@case(
    "residual added too, not finite",
    "behaviour",
    tests="a row of the residual that holds one is not finite after add_norm, as layer_norm's is not",
    reason="the other rows must come out with the same bits as without it",
)
@torch.no_grad()
def residual_spoilt(subject: Subject) -> Measurement:
    candidate = subject.candidate(64)
    residual, delta = (subject.rows(6, 64) for _ in range(2))
    spoilt = with_no_numbers(residual)
    _, clean = candidate.add_norm(residual, delta.clone())
    _, y = candidate.add_norm(spoilt.clone(), delta.clone())
    require_as_finite(y, candidate.reference(spoilt + delta), hiding=True)
    return same_numbers(y[[0, 2, 5]], clean[[0, 2, 5]])


SUM_CASES = [residual_added, residual_of_hard_rows, residual_spoilt]
