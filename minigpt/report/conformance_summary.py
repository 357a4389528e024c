"""A conformance report in a terminal and as an HTML page."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from minigpt.device import DTYPES
from minigpt.report.numerals import brief
from minigpt.report.terminal import outcome

if TYPE_CHECKING:
    from minigpt.conformance import CaseResult, ConformanceReport

MORE = "--all lists every case, --html FILE writes a page"


def conformance_summary(
    report: "ConformanceReport", dtype: str = "float32", *, every_case: bool = False
) -> RenderableType:
    """Return each dtype's verdict, the notes and diagnoses, and a line for each group with failures.

    The diagnoses of ``dtype`` come before those of other dtypes.

    Args:
        dtype: the dtype that the first line is about.
        every_case: show every case with its error, its bound and the reason for the bound, in place of the groups.
    """
    said = [f"note: {note}" for note in report.notes] + [f"diagnosis: {one}" for one in report.diagnoses_at(dtype)]
    return Group(
        _headline(report, dtype),
        *(Text(f"  {judged:10}{verdict}") for judged, verdict in _verdicts(report)),
        *(Padding(Text(sentence), (0, 0, 0, 2), expand=False) for sentence in said),
        *([_cases(report)] if every_case else [*_group_lines(report), MORE]),
    )


def _cases(report: "ConformanceReport") -> Table:
    table = Table("case", "error", "bound", "why this bound", "", box=None, pad_edge=False)
    for case in sorted(report.cases, key=lambda case: case.passed):
        figures = ("" if figure is None else brief(figure) for figure in (case.error, case.bound))
        table.add_row(case.name, *figures, case.note or case.reason, "pass" if case.passed else "FAIL")
    return table


def conformance_page(report: "ConformanceReport", dtype: str = "float32") -> str:
    """Return the report as one HTML page that needs no network."""
    from minigpt.report.page import render

    groups = dict.fromkeys(case.group for case in report.cases)
    passed = report.dtypes.get(dtype)
    return render(
        "conformance.html",
        title=f"{report.norm}: conformance",
        report=report,
        dtype=dtype,
        kind={True: "pass", False: "fail", None: "different"}[passed],
        heading={True: "A LayerNorm", False: "Not a LayerNorm", None: "Not judged"}[passed],
        diagnoses=report.diagnoses_at(dtype),
        dtypes=list(_verdicts(report)),
        groups={group: [case for case in report.cases if case.group == group] for group in groups},
    )


def _headline(report: "ConformanceReport", dtype: str) -> Text:
    passed = report.dtypes.get(dtype)
    if passed is None:
        return Text(f"NOT JUDGED  {report.norm} at {dtype} on {report.device}: {_refusal(report, dtype)}")
    judgement = "is a LayerNorm" if passed else "is not a LayerNorm"
    return outcome("PASS" if passed else "FAIL", f"{report.norm} {judgement} at {dtype} on {report.device}")


def _verdicts(report: "ConformanceReport") -> Iterator[tuple[str, str]]:
    """Yield each dtype and its verdict."""
    for dtype in DTYPES:
        judged = [case.dtypes[dtype] for case in report.cases if dtype in case.dtypes]
        if not judged:
            yield dtype, f"not judged: {_refusal(report, dtype)}"
        elif all(judged):
            yield dtype, f"a LayerNorm: {len(judged)} of {len(judged)} cases pass"
        else:
            yield dtype, f"not a LayerNorm: {judged.count(False)} of {len(judged)} cases fail"


def _refusal(report: "ConformanceReport", dtype: str) -> str:
    """Return why no case judged this dtype."""
    return next((case.refused[dtype] for case in report.cases if dtype in case.refused), "no case was asked at it")


def _group_lines(report: "ConformanceReport") -> list[Text]:
    """Return a line for each group with failures: how many fail, and the first of them."""
    lines = []
    for group in dict.fromkeys(case.group for case in report.failures):
        cases = [case for case in report.cases if case.group == group]
        failed = [case for case in cases if not case.passed]
        dtypes = sorted(set().union(*(case.failed_at for case in failed)))
        where = "" if "float32" in dtypes or not dtypes else f" at {' and '.join(dtypes)} only"
        lines.append(Text(f"  {group:10}{len(failed)} of {len(cases)} fail{where}, first {_brief(failed[0])}"))
    return lines


def _brief(case: "CaseResult") -> str:
    if case.error is None or case.bound is None:
        return f"{case.name!r}: {case.note}"
    if not case.bound:
        return f"{case.name!r}: off by {brief(case.error)}, and must be exact"
    place = f", {case.place}" if case.place else ""
    return f"{case.name!r}: {brief(case.error / case.bound)} times its bound{place}"
