"""A conformance report in a terminal and as an HTML page."""

from rich.console import RenderableType

from minigpt.conformance.case import CaseResult, by_group
from minigpt.conformance.check import ConformanceReport
from minigpt.norms.registry import KINDS
from minigpt.report.part import Cell, Part, Sheet, cell
from minigpt.report.terminal import judged

CASE_HEADS = ("case", "error", "bound", "what it asks", "why this bound", "where")
VERDICTS = {True: ("PASS", "It is"), False: ("FAIL", "It is not"), None: ("NOT JUDGED", "Not judged as")}
MORE = "--all lists every case, --html FILE writes a page."


def conformance_summary(
    report: ConformanceReport, dtype: str = "float32", *, every_case: bool = False
) -> RenderableType:
    """Return the verdict at ``dtype``, the diagnoses and notes, each dtype's verdict, and the groups with failures.

    The diagnoses of ``dtype`` come before diagnoses of other dtypes.

    Args:
        dtype: the dtype that the first line is about.
        every_case: show every case with its error, its bound and the reason for the bound.
    """
    sheet = _sheet_of(report, dtype, None if every_case else 0)
    return judged(sheet.kind, f"{sheet.heading}: {sheet.subject}", sheet.sentences, sheet.parts)


def conformance_page(report: ConformanceReport, dtype: str = "float32") -> str:
    """Return the report as one HTML page that needs no network."""
    from minigpt.report.page import render

    return render(f"{report.norm}: conformance", [_sheet_of(report, dtype)])


def _sheet_of(report: ConformanceReport, dtype: str, most_cases: int | None = None) -> Sheet:
    """Return the report, of which a terminal shows so many cases of a group; None for all."""
    verdict, is_it = VERDICTS[report.dtypes.get(dtype)]
    facts = {"covers": report.coverage, "eps": str(report.eps), "seed": str(report.seed)} | report.versions
    about = f"A norm may be {KINDS[report.kind]} at one dtype and not at another."
    parts = [
        Part("dtypes", "At each dtype", about, ("dtype", "verdict"), list(report.verdicts.items())),
        _failures(report),
        *_cases(report, most_cases),
        Part("conditions", "Conditions", "--seed draws the same again.", ("", "value"), list(facts.items()), brief=3),
    ]
    return Sheet(
        f"{is_it} {KINDS[report.kind]}",
        [part for part in parts if part.rows],
        verdict,
        f"{report.norm} at {dtype} on {report.device}",
        sentences=[*report.diagnoses_at(dtype), *report.notes],
    )


def _failures(report: ConformanceReport) -> Part:
    """Return a row for each group with failures: how many fail, at which dtypes, and the first of them."""
    rows = []
    members = by_group(report.cases)
    for group, failed in by_group(report.failures).items():
        dtypes = set[str]()
        for case in failed:
            dtypes |= case.failed_at
        count = f"{len(failed)} of {len(members[group])}"
        rows.append((group, count, ", ".join(sorted(dtypes)), failed[0].summary))
    return Part("failures", "What fails", MORE, ("group", "fail", "at", "the first"), rows)


def _cases(report: ConformanceReport, most: int | None) -> list[Part]:
    """Return a part of each group's failed cases, then parts of the others."""
    parts = []
    for verdict, folded in {"FAIL": "", "pass": "Cases", "not judged": "Cases"}.items():
        for group, members in by_group(report.cases).items():
            rows = [_case_row(case) for case in members if case.verdict == verdict]
            title = f"{group}: {len(rows)} of {len(members)} {verdict}"
            name = f"{verdict.replace(' ', '-')}-{group}"
            parts.append(Part(name, title, "", CASE_HEADS, rows, most, folded=folded))
    return parts


def _case_row(case: CaseResult) -> tuple[Cell, ...]:
    worst = case.worst
    where = []
    if case.failed_at:
        where.append(f"fails at {', '.join(sorted(case.failed_at))}")
    where += filter(None, (case.note, worst.place))
    return case.name, cell(worst, "error"), cell(worst, "bound"), case.tests, case.reason, ": ".join(where)
