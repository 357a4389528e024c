"""The cases that a function of arrays is asked, and what the report says of the others.

A package that compiles each operation again for each shape takes a second for a shape. It is asked few shapes.
"""

from collections.abc import Sequence

from minigpt.conformance.case import Axis, Case, CaseResult
from minigpt.conformance.subject import Built, Subject
from minigpt.report.numerals import brief

FEW_VALUES = {  # of the values on an axis of many
    Axis.WIDTH: ("3", "1001", "4096"),
    Axis.ROWS: ("257",),
    Axis.BATCH: ("65",),
    Axis.SEQUENCE: ("257",),
}
FEW_GRADIENTS = {Axis.WIDTH: (), Axis.ROWS: ("257",), Axis.BATCH: (), Axis.SEQUENCE: ()}
FEW_IN_WORDS = "widths 3, 64, 768, 1,001 and 4,096; up to 1,021 rows, 65 texts and 257 tokens"
ROWS_ALONE = "rows are independent of the batch"
SAME_WHEN_COPIED = "NaN-surrounded"  # a shape of an input whose memory does not reach another package


def asked_of(subject: Subject, cases: Sequence[Case]) -> list[Case]:
    """Return those of the cases that a norm is asked: all of them, unless it is a function of arrays.

    Such a function is not compiled by PyTorch, and some packages are asked few shapes.
    """
    if subject.array_function is None:
        return list(cases)
    eager = [case for case in cases if case.group != "compile"]
    if not subject.has_few_shapes:
        return eager
    return [case for case in eager if _has_few_shapes(case)]


def _has_few_shapes(case: Case) -> bool:
    if case.axis is Axis.SHAPE:
        return case.value != SAME_WHEN_COPIED
    few = FEW_GRADIENTS if case.is_backward else FEW_VALUES
    return case.axis not in few or case.value in few[case.axis]


def unasked(subject: Subject, candidate: Built) -> list[str]:
    """Return what is not judged of a function of arrays, a sentence each: its gradients, and most shapes."""
    sentences = []
    if candidate.lacks_gradients:
        sentences.append(f"gradients: not judged, since {candidate.name} gives none; its attribute vjp would")
    if subject.has_few_shapes:
        sentences.append(f"few shapes, since its package compiles each operation again for each: {FEW_IN_WORDS}")
    return sentences


def company(subject: Subject, results: Sequence[CaseResult]) -> list[str]:
    """Return a sentence if a row has other bits alone than among others, which packages beside PyTorch may give it."""
    if subject.repeats_bits:
        return []
    errors = [case.worst_measured.error or 0.0 for case in results if case.name == ROWS_ALONE]
    if not errors or not errors[0]:
        return []
    return [f"a row has other bits alone than among others, within rounding: they differ by {brief(errors[0])}"]


def coverage(subject: Subject, candidate: Built, every: str) -> str:
    """Return what the cases cover: ``every`` for a norm that is asked all of them."""
    if subject.array_function is None:
        return every
    sizes = "few widths and sizes" if subject.has_few_shapes else every.partition("; 2 to 4")[0]
    gradients = "" if candidate.lacks_gradients else "gradients, "
    return f"{sizes}; 2 to 4 dimensions; values, {gradients}calls and modes"
