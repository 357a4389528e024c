"""The sentences of a diagnosis, and the cases that show them."""

from collections.abc import Sequence

import torch

from minigpt.conformance.case import Axis, CaseResult
from minigpt.precision import DTYPES

MOST_LISTED, MOST_PATTERNS = 6, 3  # items that are listed, and patterns
UNKNOWN = "no known mistake fits"
NUMBERS = (Axis.WIDTH, Axis.ROWS, Axis.BATCH, Axis.SEQUENCE)

Results = Sequence[CaseResult]
FoundMistake = tuple[str, set[str]]  # a sentence, and the names of the dtypes that show it; none for all
Mistakes = list[FoundMistake]


def of_cases(sentence: str, cases: Results) -> FoundMistake:
    """Return a mistake that these cases show, with the place that is wrong in their tensors."""
    last = ""
    for case in cases:
        last = case.worst_measured.place or last
    if last:
        sentence = f"{sentence} ({last})"
    return sentence, wrong_at(cases)


def on_axis(cases: Results, axis: Axis) -> list[CaseResult]:
    """Return the cases that vary a property."""
    return [case for case in cases if case.axis is axis]


def without_gradients(cases: Results) -> list[CaseResult]:
    """Return the cases that compare no gradients."""
    return [case for case in cases if not case.is_backward]


def listed_values(cases: Results) -> str:
    """Return the values of cases on their axis, in one line."""
    return ", ".join(case.value for case in cases)


def wrong_at(cases: Results) -> set[str]:
    """Return the names of the dtypes at which some of these cases have wrong numbers."""
    names = set[str]()
    for case in cases:
        names |= case.wrong_at
    return names


def first_dtype(names: set[str]) -> torch.dtype:
    """Return the first of these dtypes, in the order in which the kit asks them."""
    return next(dtype for name, dtype in DTYPES.items() if name in names)


def of_numbers(failed: Results, results: Results, *, least: float = 0.0) -> Mistakes:
    """Return at which widths and sizes a norm is wrong.

    Args:
        failed, results: cases that all compare outputs, or all compare gradients.
        least: the share of numbers that must be right, so that it is no accident.
    """
    mistakes = []
    for axis in NUMBERS:
        wrong, every = on_axis(failed, axis), on_axis(results, axis)
        if wrong and len(every) - len(wrong) >= least * len(every):
            mistakes.append(of_cases(f"wrong only at {axis.value} {_listed(wrong, len(every))}", wrong))
    return mistakes


def _listed(wrong: Results, of: int) -> str:
    names = listed_values(wrong[:MOST_LISTED])
    more = len(wrong) - MOST_LISTED
    if more > 0:
        return f"{names} and {more} more of {of}"
    return names
