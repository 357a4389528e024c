"""What a conformance run found, as a person reads it in a terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from minigpt.conformance.conformance_report import ConformanceReport
from minigpt.report.parity_summary import verdict


def conformance_summary(report: ConformanceReport) -> RenderableType:
    """The verdict, what is wrong by name, and every case with its measured error, its bound and the bound's reason."""
    told = "" if report.passed else f": {len(report.failures)} of {len(report.cases)} cases fail"
    said = verdict(report.passed, f"{report.norm} on {report.device} {report.judgement}{told}")
    table = Table("case", "error", "bound", "why this bound", "", box=None, pad_edge=False)
    for case in sorted(report.cases, key=lambda case: case.passed):
        figures = ("" if figure is None else f"{figure:.3g}" for figure in (case.error, case.bound))
        table.add_row(case.name, *figures, case.note or case.reason, "pass" if case.passed else "FAIL")
    return Group(said, *(Text(f"  {diagnosis}") for diagnosis in report.diagnoses), table)
