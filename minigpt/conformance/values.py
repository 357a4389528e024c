"""Cases of value: widths, numbers of rows, kinds of row, numbers that are not finite, and layouts in memory."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from minigpt.conformance.case import Case, Measurement, against_truth, same_numbers, worst
from minigpt.conformance.rows import ROW_KINDS, RowKind, transposed, with_no_numbers
from minigpt.conformance.subject import Subject
from minigpt.conformance.truth import bound_reason
from minigpt.errors import NormError
from minigpt.placement import DTYPES

# The smallest, those that kernels are written for, GPT-2's four, and some that no block of a kernel divides
WIDTHS = (2, 3, 64, 127, 128, 256, 512, 768, 1001, 1024, 1280, 1600, 4096)
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
    "not aligned": lambda x: torch.cat([x[:, :1], x], dim=1)[:, 1:],
    "one row expanded": lambda x: x[:1].expand(12, 64),
    "sequence before batch": lambda x: x.view(4, 3, 64).transpose(0, 1),
}
FLOAT32 = bound_reason(torch.float32)


def _width(width: int, subject: Subject, dtype: torch.dtype) -> Measurement:
    return against_truth(subject.candidate(width, dtype), subject.rows(33, width, dtype=dtype))


def _row_count(count: int, subject: Subject, dtype: torch.dtype) -> Measurement:
    return against_truth(subject.candidate(16), subject.rows(count, 16, dtype=dtype))


def _row_kind(kind: RowKind, subject: Subject, dtype: torch.dtype) -> Measurement:
    found = {}
    for width in (64, 768):
        x = subject.put(kind.rows(24, width, subject.generator, dtype), dtype)
        found[f"width {width}"] = against_truth(subject.candidate(width, dtype, weights=kind.weights), x)
    return worst(found)


@torch.no_grad()
def _not_finite(subject: Subject, dtype: torch.dtype) -> Measurement:
    candidate, x = subject.candidate(64, dtype), subject.rows(6, 64, dtype=dtype)
    spoilt = with_no_numbers(x)
    reference, y = candidate.reference(spoilt), candidate(spoilt)
    hidden = y.isfinite().all(-1) & ~reference.isfinite().all(-1)  # (rows,)
    if hidden.any():
        raise NormError("it returns finite numbers where torch's layer_norm returns NaN, so it hides a NaN")
    return same_numbers(y[[0, 2, 5]], candidate(x)[[0, 2, 5]])


def _shape(shape: tuple[int, ...], subject: Subject, dtype: torch.dtype) -> Measurement:
    return against_truth(subject.candidate(shape[-1], dtype), subject.rows(*shape, dtype=dtype))


def _layout(lay: Callable[[Tensor], Tensor], subject: Subject, dtype: torch.dtype) -> Measurement:
    return against_truth(subject.candidate(), lay(subject.rows(12, 64, dtype=dtype)))


OF_WIDTHS = "rows of float32, bfloat16 and float16 numbers"
OF_NAN = "a row that holds one is not finite, as with layer_norm"
SAME_BITS = "the other rows must have the same bits as without it"
THREE = (torch.float32, torch.bfloat16, torch.float16)
LAID_OUT = (torch.float32, torch.bfloat16, torch.float64)
VALUE_CASES = [
    *(Case(f"width {width}", "widths", OF_WIDTHS, FLOAT32, partial(_width, width), THREE) for width in WIDTHS),
    *(
        Case(f"{count:,} rows", "rows", "rows of 16 float32 numbers", FLOAT32, partial(_row_count, count))
        for count in ROW_COUNTS
    ),
    *(
        Case(f"{name}, {kind.name}", "values", kind.tests, bound_reason(dtype), partial(_row_kind, kind), (dtype,))
        for name, dtype in DTYPES.items()
        for kind in ROW_KINDS
    ),
    *(
        Case(f"{name}, infinity and NaN", "special", OF_NAN, SAME_BITS, _not_finite, (dtype,))
        for name, dtype in DTYPES.items()
    ),
    *(
        Case(f"{name} input", "layouts", f"input of shape {shape}", FLOAT32, partial(_shape, shape), LAID_OUT)
        for name, shape in SHAPES.items()
    ),
    *(
        Case(f"non-contiguous: {name}", "layouts", "the norm follows strides", FLOAT32, partial(_layout, lay))
        for name, lay in LAYOUTS.items()
    ),
]
