"""A conformance report: its verdicts, and how a terminal and an HTML page show it."""

import dataclasses
from functools import cached_property
from typing import Any

from rich.console import RenderableType

from minigpt.conformance.case import CaseResult, by_group
from minigpt.files import finite
from minigpt.norms.registry import KINDS
from minigpt.precision import DTYPES
from minigpt.report.part import Cell, Part, Sheet, cell
from minigpt.report.terminal import judged

CASE_HEADS = ("case", "error", "bound", "what it asks", "why this bound", "where")
VERDICTS = {True: ("PASS", "It is"), False: ("FAIL", "It is not"), None: ("NOT JUDGED", "Not judged as")}
MORE = "--all lists every case, --html FILE writes a page."
MOST_FAILURES = 5  # failed cases that are printed


@dataclasses.dataclass(frozen=True)
class NamedMistake:
    """A sentence that names a mistake, and the names of the dtypes that show it; none if all do."""

    sentence: str
    dtypes: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class ConformanceReport:
    """Every case of one norm, and the names of its mistakes."""

    norm: str
    kind: str  # what it was judged as: "layer_norm" or "rms_norm"
    device: str
    eps: float
    seed: int
    versions: dict[str, str]
    notes: list[str]  # remarks, for example on an eps that cannot be set
    cases: list[CaseResult]
    mistakes: list[NamedMistake]  # empty if the norm passed
    coverage: str

    def _repr_html_(self) -> str:
        """Return the page in a frame, for a notebook."""
        from minigpt.report.page import framed

        return framed(f"{self.norm}: conformance", conformance_page(self))

    @property
    def passed(self) -> bool:
        """True if every case passed, at every dtype."""
        return not self.failures

    @cached_property
    def dtypes(self) -> dict[str, bool]:
        """True or False for each dtype: the norm is of its kind or not. A dtype that no case judged is absent."""
        return {dtype: all(passed) for dtype, passed in self.passed_at.items() if passed}

    @cached_property
    def passed_at(self) -> dict[str, list[bool]]:
        """Whether each case that was judged at a dtype passed there."""
        by_dtype: dict[str, list[bool]] = {dtype: [] for dtype in DTYPES}
        for case in self.cases:
            for dtype, passed in case.dtypes.items():
                by_dtype[dtype].append(passed)
        return by_dtype

    @cached_property
    def verdicts(self) -> dict[str, str]:
        """The verdict at each dtype in words."""
        verdicts: dict[str, str] = {}
        for dtype, passed in self.passed_at.items():
            failed = passed.count(False)
            verdicts[dtype] = f"{KINDS[self.kind]}: {len(passed)} of {len(passed)} cases pass"
            if failed:
                verdicts[dtype] = f"not {KINDS[self.kind]}: {failed} of {len(passed)} cases fail"
            elif not passed:
                refusals = [case.refused[dtype] for case in self.cases if dtype in case.refused]
                verdicts[dtype] = f"not judged: {[*refusals, 'no case was tried at it'][0]}"
        return verdicts

    @cached_property
    def failures(self) -> list[CaseResult]:
        """The cases that failed at a dtype."""
        return [case for case in self.cases if not case.passed]

    @property
    def diagnoses(self) -> list[str]:
        """The mistakes in words, most important first."""
        return [mistake.sentence for mistake in self.mistakes]

    def diagnoses_at(self, dtype: str) -> list[str]:
        """Return the diagnoses: first of ``dtype``, then of other dtypes."""
        here: list[str] = []
        elsewhere: list[str] = []
        for mistake in self.mistakes:
            is_of_others = bool(mistake.dtypes) and dtype not in mistake.dtypes
            sentences = elsewhere if is_of_others else here
            sentences.append(mistake.sentence)
        return here + elsewhere

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON types; a number that is not finite is null."""
        return finite(
            {
                "verdict": "pass" if self.passed else "fail",
                "norm": self.norm,
                "kind": self.kind,
                "device": self.device,
                "eps": self.eps,
                "seed": self.seed,
                "versions": self.versions,
                "notes": self.notes,
                "cases": [case.to_dict() for case in self.cases],
                "diagnoses": self.diagnoses,
                "dtypes": self.dtypes,
                "coverage": self.coverage,
            }
        )

    def __str__(self) -> str:
        """Return the verdict with the first mistake, the other mistakes, the first failed cases and the notes."""
        judged = [case for case in self.cases if case.is_judged]
        counted = f"{len(judged) - len(self.failures)} of {len(judged)} cases pass"
        lines = [f"{self.norm} is {KINDS[self.kind]} on {self.device}: {counted}"]
        if not self.passed:
            wrong = ", ".join(dtype for dtype, passed in self.dtypes.items() if not passed)
            first, *others = self.diagnoses
            lines = [f"{self.norm} is not {KINDS[self.kind]} at {wrong} on {self.device}: {first}"]
            lines += [*(f"also: {mistake}" for mistake in others), counted]
        lines += map(str, self.failures[:MOST_FAILURES])
        if len(self.failures) > MOST_FAILURES:
            lines.append(f"and {len(self.failures) - MOST_FAILURES} more, in the report's ``failures``")
        for note in self.notes:
            lines.append(f"note: {note}")
        return "\n  ".join(lines)


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
