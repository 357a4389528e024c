"""A conformance report in a terminal and as an HTML page."""

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from minigpt.conformance.case import CaseResult, by_group
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

    The diagnoses of ``dtype`` come before diagnoses of other dtypes.

    Args:
        dtype: the dtype that the first line is about.
        every_case: show every case with its error, its bound and the reason for the bound, in place of the groups.
    """
    lines: list[RenderableType] = [_headline(report, dtype)]
    for name, verdict in report.verdicts.items():
        lines.append(Text(f"  {name:10}{verdict}"))
    for note in report.notes:
        lines.append(_indented(f"note: {note}"))
    for diagnosis in report.diagnoses_at(dtype):
        lines.append(_indented(f"diagnosis: {diagnosis}"))
    if every_case:
        lines.append(_cases(report))
    else:
        lines += _group_lines(report)
    lines.append(Text(f"  covers    {report.coverage}"))
    lines.append(Text(f"  seed      {report.seed}: --seed {report.seed} draws the same again"))
    if not every_case:
        lines.append(MORE)
    return Group(*lines)


def _indented(sentence: str) -> Padding:
    return Padding(Text(sentence), (0, 0, 0, 2), expand=False)


def conformance_page(report: ConformanceReport, dtype: str = "float32") -> str:
    """Return the report as one HTML page that needs no network."""
    from minigpt.report.page import Sheet, render

    about = f"A norm may be {KINDS[report.kind]} at one dtype and not at another."
    facts = {"covers": report.coverage, "eps": str(report.eps), "seed": str(report.seed)} | report.versions
    failures, others = _parts(report)
    parts = [
        Part("dtypes", "At each dtype", about, ("dtype", "verdict"), list(report.verdicts.items())),
        *failures,
        *others,
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
    failures, others = [], []
    for group, members in by_group(report.cases).items():
        failed, passed, not_judged = [], [], []
        for case in members:
            if not case.is_judged:
                not_judged.append(_row(case))
            elif case.passed:
                passed.append(_row(case))
            else:
                failed.append(_row(case))
        count = len(failed) + len(passed)
        if failed:
            title = f"{group}: {len(failed)} of {count} FAIL"
            failures.append(Part(f"failures-{group}", title, "", CASE_HEADS, failed))
        if passed:
            title = f"{group}: {len(passed)} of {count} pass"
            others.append(Part(f"passes-{group}", title, "", CASE_HEADS, passed, folded="Cases"))
        if not_judged:
            title = f"{group}: {len(not_judged)} not judged"
            others.append(Part(f"not-judged-{group}", title, "", CASE_HEADS, not_judged, folded="Cases"))
    return failures, others


def _row(case: CaseResult) -> tuple[Cell, ...]:
    worst = case.worst
    where = []
    if case.failed_at:
        where.append(f"fails at {', '.join(sorted(case.failed_at))}")
    where += filter(None, (case.note, worst.place))
    return case.name, _number(worst.error), _number(worst.bound), case.tests, case.reason, ": ".join(where)


def _number(value: float | None) -> Number | None:
    return None if value is None else Number(value)


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
        worst = case.worst
        verdict = "pass" if case.passed else "FAIL"
        if not case.is_judged:
            verdict = "not judged"
        table.add_row(case.name, _figure(worst.error), _figure(worst.bound), case.reason, case.note, verdict)
    return table


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return brief(value)


def _group_lines(report: ConformanceReport) -> list[Text]:
    """Return a line for each group with failures: how many fail, and the first of them."""
    lines = []
    members = by_group(report.cases)
    for group, failed in by_group(report.failures).items():
        dtypes = set[str]()
        for case in failed:
            dtypes |= case.failed_at
        count = f"{len(failed)} of {len(members[group])} fail"
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
    words = f"{case.name!r}: {brief(worst.ratio)} times its bound"
    if worst.place:
        words += f", {worst.place}"
    return words
