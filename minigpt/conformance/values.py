"""Cases of value: widths, numbers of rows, kinds of row, numbers that are not finite, and layouts in memory."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from minigpt.conformance.case import (
    Measurement,
    against_truth,
    case,
    require_as_finite,
    same_numbers,
    worst,
    worst_element,
)
from minigpt.conformance.rows import OVERFLOWING, ROW_KINDS, RowKind, ordinary, transposed, with_no_numbers
from minigpt.conformance.subject import Candidate, Mismatch, Subject, Unsupported, described
from minigpt.conformance.truth import bound_reason, truth
from minigpt.errors import RAISED
from minigpt.placement import DTYPES

# The smallest, those that kernels are written for, GPT-2's four, and some that no block of a kernel divides
WIDTHS = (1, 2, 3, 5, 64, 127, 128, 256, 512, 768, 1001, 1024, 1280, 1600, 2048, 4096)
ROW_COUNTS = (0, 1, 65_535, 65_536, 65_537)  # CUDA's grid ends at 65,535 in two of its three dimensions
SHAPES = {
    "2-D": (12, 64),
    "3-D": (3, 4, 64),
    "4-D": (2, 3, 2, 64),
    "no token": (2, 0, 64),
    "one token": (1, 1, 64),
    "decoding": (12, 1, 64),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {  # of 12 rows in memory: (12, 64) -> (..., 64)
    "transposed": transposed,
    "every second column": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "every second row": lambda x: x.repeat_interleave(2, dim=0)[::2],
    "not aligned": lambda x: torch.cat([x[:, :1], x], dim=1)[:, 1:],
    "one row expanded": lambda x: x[:1].expand(12, 64),
    "sequence before batch": lambda x: x.view(4, 3, 64).transpose(0, 1),
    "channels before sequence": lambda x: x.view(3, 4, 64).transpose(1, 2).contiguous().transpose(1, 2),
}
FLOAT32 = bound_reason(torch.float32)
SAME_BITS = "the other rows must have the same bits as without it"
WIDTH_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _width(width: int, subject: Subject, dtype: torch.dtype) -> Measurement:
    rows = ordinary(33, width, subject.generator)
    return against_truth(subject.candidate(width, dtype), subject.put(rows, dtype))


def _row_count(count: int, subject: Subject, dtype: torch.dtype) -> Measurement:
    rows = {width: ordinary(count, width, subject.generator) for width in (3, 16)}
    return worst(
        {f"width {width}": against_truth(subject.candidate(width), subject.put(x, dtype)) for width, x in rows.items()}
    )


def _row_kind(kind: RowKind, subject: Subject, dtype: torch.dtype) -> Measurement:
    rows = {width: kind.rows(24, width, subject.generator, dtype) for width in (64, 768)}
    return worst(
        {
            f"width {width}": against_truth(
                subject.candidate(width, dtype, weights=kind.weights), subject.put(x, dtype)
            )
            for width, x in rows.items()
        }
    )


@torch.no_grad()
def _not_finite(subject: Subject, dtype: torch.dtype) -> Measurement:
    x = subject.rows(6, 64, dtype=dtype)
    spoilt = with_no_numbers(x)
    candidate = subject.candidate(64, dtype)
    reference, y = candidate.reference(spoilt), candidate(spoilt)
    require_as_finite(y, reference, hiding=True)
    return same_numbers(y[[0, 2, 5]], candidate(x)[[0, 2, 5]])


@torch.no_grad()
def _overflowing(subject: Subject, dtype: torch.dtype) -> Measurement:
    x = subject.rows(6, 64, dtype=dtype)
    spoilt = x.clone()
    spoilt[1::3] *= OVERFLOWING[dtype]
    candidate = subject.candidate(64, dtype)
    reference, y = candidate.reference(spoilt), candidate(spoilt)
    require_as_finite(y, reference, hiding=False)  # PyTorch's own answer to such rows is not always finite
    return same_numbers(y[[0, 2, 3, 5]], candidate(x)[[0, 2, 3, 5]])


def _shape(shape: tuple[int, ...], subject: Subject, dtype: torch.dtype) -> Measurement:
    return against_truth(subject.candidate(shape[-1], dtype), subject.rows(*shape, dtype=dtype))


def _layout(lay: Callable[[Tensor], Tensor], subject: Subject, dtype: torch.dtype) -> Measurement:
    return against_truth(subject.candidate(64), lay(subject.rows(12, 64, dtype=dtype)))


@case("rows of several dimensions", "layouts", tests="normalized_shape (3, 5)", reason=FLOAT32)
def several_dimensions(subject: Subject, dtype: torch.dtype) -> Measurement:
    """GPT-2 needs one dimension only, so a norm over the last one alone is not judged."""
    x = subject.rows(4, 15, dtype=dtype).view(4, 3, 5)
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


VALUE_CASES = [
    *(
        case(
            f"width {width}",
            "widths",
            tests="rows of float32, bfloat16 and float16 numbers",
            reason="for each dtype, the bound of its ordinary rows",
            dtypes=WIDTH_DTYPES,
        )(partial(_width, width))
        for width in WIDTHS
    ),
    *(
        case(f"{count:,} rows", "rows", tests="rows of 3 and of 16 float32 numbers", reason=FLOAT32)(
            partial(_row_count, count)
        )
        for count in ROW_COUNTS
    ),
    *(
        case(f"{name}, {kind.name}", "values", tests=kind.tests, reason=bound_reason(dtype), dtypes=(dtype,))(
            partial(_row_kind, kind)
        )
        for name, dtype in DTYPES.items()
        for kind in ROW_KINDS
    ),
    *(
        case(
            f"{name}, infinity and NaN",
            "special",
            tests="a row that holds one is not finite, as with layer_norm",
            reason=SAME_BITS,
            dtypes=(dtype,),
        )(_not_finite)
        for name, dtype in DTYPES.items()
    ),
    *(
        case(
            f"{name}, overflowing squares",
            "special",
            tests="a row whose squares overflow is finite where layer_norm's is",
            reason=SAME_BITS,
            dtypes=(dtype,),
        )(_overflowing)
        for name, dtype in DTYPES.items()
        if dtype in OVERFLOWING
    ),
    *(
        case(
            f"{name} input",
            "layouts",
            tests=f"input of shape {shape}",
            reason=FLOAT32,
            dtypes=(torch.float32, torch.bfloat16),
        )(partial(_shape, shape))
        for name, shape in SHAPES.items()
    ),
    *(
        case(f"non-contiguous: {name}", "layouts", tests="the norm follows strides", reason=FLOAT32)(
            partial(_layout, lay)
        )
        for name, lay in LAYOUTS.items()
    ),
    several_dimensions,
]
