"""A conformance report in a terminal and as an HTML page."""

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from minigpt.conformance.case import CaseResult
from minigpt.conformance.check import ConformanceReport
from minigpt.norms.registry import KINDS
from minigpt.report.numerals import brief
from minigpt.report.parts import Cell, Number, Part
from minigpt.report.terminal import outcome

CASE_HEADS = ("case", "error", "bound", "what it asks", "why this bound", "where")
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
    lines: list[RenderableType] = [_headline(report, dtype)]
    for name, verdict in report.verdicts.items():
        lines.append(Text(f"  {name:10}{verdict}"))
    for sentence in sentences:
        lines.append(Padding(Text(sentence), (0, 0, 0, 2), expand=False))
    lines += [_cases(report)] if every_case else _group_lines(report)
    lines.append(Text(f"  covers    {report.coverage}"))
    lines.append(Text(f"  seed      {report.seed}: --seed {report.seed} asks the same again"))
    if not every_case:
        lines.append(MORE)
    return Group(*lines)


def conformance_page(report: ConformanceReport, dtype: str = "float32") -> str:
    """Return the report as one HTML page that needs no network."""
    from minigpt.report.page import Sheet, render

    about = f"A norm may be {KINDS[report.kind]} at one dtype and not at another."
    facts = {"covers": report.coverage, "eps": str(report.eps), "seed": str(report.seed)} | report.versions
    failures, passes = _parts(report)
    parts = [
        Part("dtypes", "At each dtype", about, ("dtype", "verdict"), list(report.verdicts.items())),
        *failures,
        *passes,
        Part("conditions", "Conditions", "What the norm was checked with.", ("", "value"), list(facts.items())),
    ]
    passed = report.dtypes.get(dtype)
    verdict, heading = VERDICTS[passed]
    if passed is not None:
        heading = f"{heading} {KINDS[report.kind]}"
    subject = f"{report.norm} at {dtype} on {report.device}"
    sentences = [*report.diagnoses_at(dtype), *report.notes]
    sheet = Sheet(heading, parts, verdict, subject, sentences=sentences)
    return render(f"{report.norm}: conformance", [sheet])


def _parts(report: ConformanceReport) -> tuple[list[Part], list[Part]]:
    """Return a part of each group's failed cases, and one of each group's other cases."""
    failures, passes = [], []
    for group in dict.fromkeys(case.group for case in report.cases):
        members = [case for case in report.cases if case.group == group]
        failed = [_row(case) for case in members if not case.passed]
        passed = [_row(case) for case in members if case.passed]
        if failed:
            title = f"{group}: {len(failed)} of {len(members)} FAIL"
            failures.append(Part(f"failures-{group}", title, "", CASE_HEADS, failed))
        if passed:
            title = f"{group}: {len(passed)} of {len(members)} pass"
            passes.append(Part(f"passes-{group}", title, "", CASE_HEADS, passed, folded="Cases"))
    return failures, passes


def _row(case: CaseResult) -> tuple[Cell, ...]:
    worst = case.worst
    error = None if worst.error is None else Number(worst.error)
    bound = None if worst.bound is None else Number(worst.bound)
    where = [f"fails at {', '.join(sorted(case.failed_at))}"] if case.failed_at else []
    where += [words for words in (case.note, worst.place) if words]
    return case.name, error, bound, case.tests, case.reason, ": ".join(where)


def _headline(report: ConformanceReport, dtype: str) -> Text:
    passed, place = report.dtypes.get(dtype), f"at {dtype} on {report.device}"
    if passed is None:
        reason = report.verdicts[dtype].removeprefix("not judged: ")
        return Text(f"NOT JUDGED  {report.norm} {place}: {reason}")
    if passed:
        return outcome("PASS", f"{report.norm} is {KINDS[report.kind]} {place}")
    return outcome("FAIL", f"{report.norm} is not {KINDS[report.kind]} {place}")


def _cases(report: ConformanceReport) -> Table:
    table = Table("case", "error", "bound", "why this bound", "where", "", box=None, pad_edge=False)
    for case in sorted(report.cases, key=lambda case: case.passed):
        verdict = "pass" if case.passed else "FAIL"
        error, bound = _figure(case.worst.error), _figure(case.worst.bound)
        table.add_row(case.name, error, bound, case.reason, case.note, verdict)
    return table


def _figure(value: float | None) -> str:
    return "" if value is None else brief(value)


def _group_lines(report: ConformanceReport) -> list[Text]:
    """Return a line for each group with failures: how many fail, and the first of them."""
    lines = []
    for group in dict.fromkeys(case.group for case in report.failures):
        cases = [case for case in report.cases if case.group == group]
        failed = [case for case in cases if not case.passed]
        dtypes = set[str]().union(*(case.failed_at for case in failed))
        count = f"{len(failed)} of {len(cases)} fail"
        if "float32" not in dtypes:
            count += f" at {' and '.join(sorted(dtypes))} only"
        lines.append(Text(f"  {group:10}{count}, first {_brief(failed[0])}"))
    return lines


def _brief(case: CaseResult) -> str:
    worst = case.worst
    if worst.error is None or worst.bound is None:
        return f"{case.name!r}: {worst.note}"
    if not worst.bound:
        return f"{case.name!r}: off by {brief(worst.error)}, and must be exact"
    place = f", {worst.place}" if worst.place else ""
    return f"{case.name!r}: {brief(worst.ratio)} times its bound{place}"
