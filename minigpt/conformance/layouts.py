"""Cases of layout: number of dimensions, memory that is not contiguous, rows of several dimensions."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from minigpt.conformance.case import Measurement, against_truth, case, worst, worst_element
from minigpt.conformance.rows import transposed
from minigpt.conformance.subject import Candidate, Mismatch, Subject, Unsupported, described
from minigpt.conformance.truth import bound_reason, truth
from minigpt.errors import RAISED
from minigpt.placement import dtype_name

SHAPES = {
    "2-D": (12, 64),
    "3-D": (3, 4, 64),
    "4-D": (2, 3, 2, 64),
    "no token": (2, 0, 64),
    "one token": (1, 1, 64),
    "decoding": (12, 1, 64),
}

# Ways to lay 12 rows of 64 into memory: (12, 64) -> (..., 64)
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": transposed,
    "every second column": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "every second row": lambda x: x.repeat_interleave(2, dim=0)[::2],
    "not aligned": lambda x: torch.cat([x[:, :1], x], dim=1)[:, 1:],
    "one row expanded": lambda x: x[:1].expand(12, 64),
    "sequence before batch": lambda x: x.view(4, 3, 64).transpose(0, 1),
    "channels before sequence": lambda x: x.view(3, 4, 64).transpose(1, 2).contiguous().transpose(1, 2),
}
FLOAT32 = bound_reason(torch.float32)


def _shape(shape: tuple[int, ...], subject: Subject) -> Measurement:
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        x = subject.rows(*shape, dtype=dtype)
        found[dtype_name(dtype)] = against_truth(subject.candidate(shape[-1], dtype), x)
    return worst(found)


def _layout(lay: Callable[[Tensor], Tensor], subject: Subject) -> Measurement:
    return against_truth(subject.candidate(64), lay(subject.rows(12, 64)))


@case("rows of several dimensions", "layouts", tests="normalized_shape (3, 5)", reason=FLOAT32)
def several_dimensions(subject: Subject) -> Measurement:
    """A norm over one dimension alone is no mistake, if it says so or normalizes the last; GPT-2 needs no more."""
    x = subject.rows(4, 15).view(4, 3, 5)
    try:
        candidate = subject.candidate((3, 5))
        with torch.no_grad():
            y = candidate(x)
    except Mismatch:
        raise
    except RAISED as error:
        raise Unsupported(f"it takes rows of one dimension only: {described(error)}") from error
    found = against_truth(candidate, x, y)
    if not found.within and _is_over_last_dimension(candidate, x, y):
        raise Unsupported("it takes rows of one dimension only: over (3, 5) it normalizes the last one alone")
    return found


def _is_over_last_dimension(candidate: Candidate, x: Tensor, y: Tensor) -> bool:
    standard, bound = truth(x, torch.ones(5), None, candidate.eps)  # (4, 3, 5)
    scale, shift = (parameter.detach().cpu().double() for parameter in candidate.parameters.values())  # (3, 5)
    return worst_element(y, standard * scale + shift, 2 * bound * scale.abs() + 1e-6).within


LAYOUT_CASES = [
    *(
        case(f"{name} input", "layouts", tests=f"input of shape {shape}", reason=FLOAT32)(partial(_shape, shape))
        for name, shape in SHAPES.items()
    ),
    *(
        case(f"non-contiguous: {name}", "layouts", tests="strides are followed", reason=FLOAT32)(partial(_layout, lay))
        for name, lay in LAYOUTS.items()
    ),
    several_dimensions,
]
