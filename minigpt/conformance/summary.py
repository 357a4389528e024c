"""A conformance report in a terminal and as an HTML page."""

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from minigpt.conformance.case import CaseResult
from minigpt.conformance.check import COVERAGE, ConformanceReport
from minigpt.norms.registry import KINDS
from minigpt.report.numerals import brief
from minigpt.report.parts import Cell, Number, Part
from minigpt.report.terminal import outcome

CASE_HEADS = ("case", "error", "bound", "what it asks", "why this bound")
VERDICTS = {True: ("PASS", "It is"), False: ("FAIL", "It is not"), None: ("DIFFERENT", "Not judged")}
MORE = "--all lists every case, --html FILE writes a page"


def conformance_summary(
    report: ConformanceReport, dtype: str = "float32", *, every_case: bool = False
) -> RenderableType:
    """Return each dtype's verdict, the notes and diagnoses, and a line for each group with failures.

    The diagnoses of ``dtype`` come before those of other dtypes.

    Args:
        dtype: the dtype that the first line is about.
        every_case: show every case with its error, its bound and the reason for the bound, in place of the groups.
    """
    sentences = [f"note: {note}" for note in report.notes]
    sentences += [f"diagnosis: {diagnosis}" for diagnosis in report.diagnoses_at(dtype)]
    return Group(
        _headline(report, dtype),
        *(Text(f"  {name:10}{verdict}") for name, verdict in report.verdicts.items()),
        *(Padding(Text(sentence), (0, 0, 0, 2), expand=False) for sentence in sentences),
        *([_cases(report)] if every_case else _group_lines(report)),
        Text(f"  covers    {COVERAGE}"),
        Text(f"  seed      {report.seed}: --seed {report.seed} asks the same again"),
        *([] if every_case else [MORE]),
    )


def conformance_page(report: ConformanceReport, dtype: str = "float32") -> str:
    """Return the report as one HTML page that needs no network."""
    from minigpt.report.page import Sheet, render

    cases: list[Part] = []
    for group in dict.fromkeys(case.group for case in report.cases):
        members = [case for case in report.cases if case.group == group]
        for name, word, passed in (("failures", "FAIL", False), ("passes", "pass", True)):
            rows = [_row(case) for case in members if case.passed is passed]
            title = f"{group}: {len(rows)} of {len(members)} {word}"
            cases.append(Part(f"{name}-{group}", title, "", CASE_HEADS, rows, folded="Cases" if passed else ""))
    about = f"A norm may be {KINDS[report.kind]} at one dtype and not at another."
    facts = {"covers": COVERAGE, "eps": str(report.eps), "seed": str(report.seed)} | report.versions
    parts = [
        Part("dtypes", "At each dtype", about, ("dtype", "verdict"), [*report.verdicts.items()]),
        *sorted((part for part in cases if part.rows), key=lambda part: part.folded),
        Part("conditions", "Conditions", "What the norm was checked with.", ("", "value"), [*facts.items()]),
    ]
    passed = report.dtypes.get(dtype)
    verdict, heading = VERDICTS[passed]
    heading = heading if passed is None else f"{heading} {KINDS[report.kind]}"
    subject, sentences = f"{report.norm} at {dtype} on {report.device}", [*report.diagnoses_at(dtype), *report.notes]
    return render(f"{report.norm}: conformance", [Sheet(heading, parts, verdict, subject, sentences=sentences)])


def _row(case: CaseResult) -> tuple[Cell, ...]:
    error, bound = (None if x is None else Number(x) for x in (case.worst.error, case.worst.bound))
    where = f"fails at {', '.join(sorted(case.failed_at))}: " if case.failed_at else ""
    return case.name, error, bound, case.tests, f"{where}{case.note or case.reason}"


def _headline(report: ConformanceReport, dtype: str) -> Text:
    passed = report.dtypes.get(dtype)
    if passed is None:
        reason = report.verdicts[dtype].removeprefix("not judged: ")
        return Text(f"NOT JUDGED  {report.norm} at {dtype} on {report.device}: {reason}")
    judgement = f"is {KINDS[report.kind]}" if passed else f"is not {KINDS[report.kind]}"
    return outcome("PASS" if passed else "FAIL", f"{report.norm} {judgement} at {dtype} on {report.device}")


def _cases(report: ConformanceReport) -> Table:
    table = Table("case", "error", "bound", "why this bound", "", box=None, pad_edge=False)
    for case in sorted(report.cases, key=lambda case: case.passed):
        figures = ("" if figure is None else brief(figure) for figure in (case.worst.error, case.worst.bound))
        table.add_row(case.name, *figures, case.note or case.reason, "pass" if case.passed else "FAIL")
    return table


def _group_lines(report: ConformanceReport) -> list[Text]:
    """Return a line for each group with failures: how many fail, and the first of them."""
    lines = []
    for group in dict.fromkeys(case.group for case in report.failures):
        cases = [case for case in report.cases if case.group == group]
        failed = [case for case in cases if not case.passed]
        dtypes = sorted(set[str]().union(*(case.failed_at for case in failed)))
        where = "" if "float32" in dtypes else f" at {' and '.join(dtypes)} only"
        lines.append(Text(f"  {group:10}{len(failed)} of {len(cases)} fail{where}, first {_brief(failed[0])}"))
    return lines


def _brief(case: CaseResult) -> str:
    worst = case.worst
    if worst.error is None or worst.bound is None:
        return f"{case.name!r}: {worst.note}"
    if not worst.bound:
        return f"{case.name!r}: off by {brief(worst.error)}, and must be exact"
    place = f", {worst.place}" if worst.place else ""
    return f"{case.name!r}: {brief(worst.ratio)} times its bound{place}"
