"""The object that a judgement returns, which is the JSON of ``minigpt parity``, its terminal summary and its page."""

import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minigpt.errors import MiniGPTError
from minigpt.files import finite, write_atomically
from minigpt.report.fields import Causes, ParityFigures, ReportFields, Verdict, has_norm
from minigpt.report.from_json import from_json

NO_FIELDS = ("passed", "speed")  # of a report: what follows from its fields, and what older versions wrote


def read_reports(reports: Sequence[Any]) -> list["ParityReport"]:
    """Return the reports of JSON objects.

    Raises:
        MiniGPTError: if one of them is not a parity report of this version; the message has its number.
    """
    read: list[ParityReport] = []
    for number, fields in enumerate(reports, 1):
        try:
            read.append(ParityReport.from_dict(fields))
        except MiniGPTError as error:
            raise MiniGPTError(str(error).replace("it is", f"report {number} is", 1)) from error
    return read


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class ParityReport(ReportFields):
    """Is the candidate still the same model as the original, as transformers computes it?

    It has the fields of the figures, of the verdict and of its causes, which ``minigpt.report.fields`` describes, and
    the notes of all three. ``print`` shows it as the command does, and a notebook as the page of ``--html``.
    """

    @classmethod
    def of(cls, figures: ParityFigures, verdict: Verdict, causes: Causes) -> "ParityReport":
        """Return the report of what was measured, decided and found."""
        fields: dict[str, Any] = vars(figures) | vars(verdict) | vars(causes)
        fields["notes"] = [*figures.notes, *verdict.notes, *causes.notes]
        return cls(**fields)

    @classmethod
    def from_dict(cls, fields: Any) -> "ParityReport":
        """Return the report that ``to_dict`` wrote, also to a JSON file; a number that is null there is NaN.

        Raises:
            MiniGPTError: if it is not a parity report of this version.
        """
        try:
            return from_json(cls, {name: value for name, value in dict(fields).items() if name not in NO_FIELDS})
        except (TypeError, ValueError) as error:
            raise MiniGPTError(
                "it is not a parity report of this version; write one with minigpt parity --json FILE"
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """Return the report in JSON's own types, with ``passed``; a number that is not finite is null."""
        return finite(dataclasses.asdict(self)) | {"passed": self.passed}

    def to_html(self, path: str | Path) -> None:
        """Write the report as one self-contained page."""
        from minigpt.report.page import report_page

        write_atomically(path, report_page(self))

    def __repr__(self) -> str:
        subject = self.model
        if has_norm(self):
            subject = f"{self.norm} at {', '.join(self.sites)} in {self.model}"
        return f"<ParityReport {self.outcome}: {subject}>"

    def __str__(self) -> str:
        from rich.console import Console

        from minigpt.report.parts import parity_summary

        console = Console(file=io.StringIO(), width=max(80, Console().width))
        with console.capture() as caught:
            console.print(parity_summary(self))
        lines = [line.rstrip() for line in caught.get().splitlines()]
        return "\n".join(lines).rstrip()

    def _repr_html_(self) -> str:
        """Return the page in a frame, for a notebook."""
        from minigpt.report.page import framed, report_page

        return framed(repr(self), report_page(self))
