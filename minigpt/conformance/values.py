"""Cases of value: every width, every number of rows, every kind of row at every dtype, and what is not finite."""

from functools import partial

import torch

from minigpt.conformance.case import Measurement, against_truth, case, require_as_finite, same_numbers, worst
from minigpt.conformance.rows import OVERFLOWING, ROW_KINDS, RowKind, ordinary, with_no_numbers
from minigpt.conformance.subject import Subject
from minigpt.conformance.truth import bound_reason
from minigpt.placement import DTYPES

# The smallest, those that kernels are written for, GPT-2's four, and some that no vector fits
WIDTHS = (1, 2, 3, 5, 64, 127, 128, 256, 512, 768, 1001, 1024, 1280, 1600, 2048, 4096)
ROW_COUNTS = (0, 1, 65_535, 65_536, 65_537)  # CUDA's grid ends at 65,535 in two of its three dimensions
SAME_BITS = "the other rows must come out with the same bits as without it"


def _width(width: int, subject: Subject) -> Measurement:
    rows = ordinary(33, width, subject.generator)
    return worst(
        {
            name: against_truth(subject.candidate(width, dtype), subject.put(rows, dtype))
            for name, dtype in DTYPES.items()
            if dtype != torch.float64
        }
    )


def _row_count(count: int, subject: Subject) -> Measurement:
    rows = {width: ordinary(count, width, subject.generator) for width in (3, 16)}
    return worst(
        {f"width {width}": against_truth(subject.candidate(width), subject.put(x)) for width, x in rows.items()}
    )


def _row_kind(kind: RowKind, dtype: torch.dtype, subject: Subject) -> Measurement:
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
def _not_finite(dtype: torch.dtype, subject: Subject) -> Measurement:
    x = subject.rows(6, 64, dtype=dtype)
    spoilt = with_no_numbers(x)
    candidate = subject.candidate(64, dtype)
    reference, y = candidate.reference(spoilt), candidate(spoilt)
    require_as_finite(y, reference, hiding=True)
    return same_numbers(y[[0, 2, 5]], candidate(x)[[0, 2, 5]])


@torch.no_grad()
def _overflowing(dtype: torch.dtype, subject: Subject) -> Measurement:
    x = subject.rows(6, 64, dtype=dtype)
    spoilt = x.clone()
    spoilt[1::3] *= OVERFLOWING[dtype]
    candidate = subject.candidate(64, dtype)
    reference, y = candidate.reference(spoilt), candidate(spoilt)
    require_as_finite(y, reference, hiding=False)  # torch's own answer to these is not always finite
    return same_numbers(y[[0, 2, 3, 5]], candidate(x)[[0, 2, 3, 5]])


VALUE_CASES = [
    *(
        case(
            f"width {width}",
            "widths",
            tests="rows of float32, bfloat16 and float16 numbers",
            reason="for each dtype, the bound of its ordinary rows",
        )(partial(_width, width))
        for width in WIDTHS
    ),
    *(
        case(
            f"{count:,} rows",
            "rows",
            tests="rows of 3 and of 16 float32 numbers",
            reason=bound_reason(torch.float32),
        )(partial(_row_count, count))
        for count in ROW_COUNTS
    ),
    *(
        case(f"{name}, {kind.name}", "values", tests=kind.tests, reason=bound_reason(dtype))(
            partial(_row_kind, kind, dtype)
        )
        for name, dtype in DTYPES.items()
        for kind in ROW_KINDS
    ),
    *(
        case(
            f"{name}, infinity and NaN",
            "special",
            tests="a row that holds one is not finite, as layer_norm's is not",
            reason=SAME_BITS,
        )(partial(_not_finite, dtype))
        for name, dtype in DTYPES.items()
    ),
    *(
        case(
            f"{name}, overflowing squares",
            "special",
            tests="a row whose squares overflow is finite where layer_norm's is",
            reason=SAME_BITS,
        )(partial(_overflowing, dtype))
        for name, dtype in DTYPES.items()
        if dtype in OVERFLOWING
    ),
]
