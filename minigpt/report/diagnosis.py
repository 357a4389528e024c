"""The sentences of a report on its error: whose precision it is like, and which mistake explains it."""

from minigpt.report.fields import Diagnosed, ParityFields, Precision
from minigpt.report.numerals import brief

NEAR = 1.5  # an error is like transformers' own if neither is larger by more than this factor


def is_near(precision: Precision | None) -> bool:
    """Return whether an error is so near to transformers' own at a dtype that it is like it."""
    return precision is not None and 1 / NEAR <= precision.ratio <= NEAR


def precision_line(report: ParityFields) -> list[str]:
    """Return the sentence on the precision that the error is like, if there is one and nothing else explains it."""
    precision = report.precision
    if precision is None or not is_near(precision):
        return []
    if report.outcome == "DIFFERENT" or report.diagnosis:
        return []
    name = precision.like
    how = f"{brief(precision.ratio)} times transformers' own at {name}"
    if report.passed or report.diagnosis is not None:
        return [f"Its error is {how}: it computes in {name}."]
    return [f"Its error is {how}, as if it computed in {name}."]


def diagnosis_lines(report: ParityFields) -> list[str]:
    """Return the sentence on the mistakes that explain the error, or that there is none."""
    if report.diagnosis is None:
        return []
    rows = report.diagnosis
    if not rows and precision_line(report):
        return []  # the precision explains the error
    if not rows:
        return ["No mistake that is known gives these logits."]
    names = " and with ".join(row.mistake for row in rows)
    last = rows[-1]
    ratio = brief(last.ratio)
    if last.explains:
        kind = "GPT-2" if report.bitwise is not None else "model"
        return [f"It is this {kind} with {names}: then its error is {ratio} times transformers' own."]
    fall = f"With {names} the error falls from {brief(report.logits.ratio)} to {ratio} times transformers' own"
    return [f"{fall}{_rest(last)}."]


def _rest(row: Diagnosed) -> str:
    """Return what the rest of an error is like, if it is like a precision."""
    rest = row.rest
    if rest is None or not is_near(rest):
        return ""
    return f"; the rest is {brief(rest.ratio)} times its own at {rest.like}"
