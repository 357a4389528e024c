"""The object that a judgement returns, which is the JSON of ``minigpt parity``, its terminal summary and its page."""

import dataclasses
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minigpt.files import finite, write_atomically
from minigpt.report.fields import BudgetLine, Diagnosed, ParityFigures, PlaceOff, Precision, Verdict


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class ParityReport(ParityFigures):
    """Is the candidate still the same model as the original, as transformers computes it?

    ``print`` shows it as the command does, and a notebook as the page of ``--html``. ``minigpt.report.fields``
    describes its parts.

    Attributes:
        verdict, reasons: "pass" or "fail", and a sentence for each reason.
        budget: the limits that decide in place of parity.
        first_off: where the error begins.
        changes: what the candidate's code changed in the process; any is a fault.
        precision: the dtype whose own error in transformers is nearest to the candidate's.
        diagnosis: mistakes that give the candidate's logits, one on top of the other; empty if no known one does; None
            if none was sought.
    """

    verdict: str
    reasons: Sequence[str]
    budget: list[BudgetLine] | None
    first_off: PlaceOff | None
    changes: list[str]
    precision: Precision | None
    diagnosis: list[Diagnosed] | None

    @classmethod
    def of(
        cls,
        figures: ParityFigures,
        verdict: Verdict,
        precision: Precision | None = None,
        diagnosis: list[Diagnosed] | None = None,
        notes: Sequence[str] = (),
    ) -> "ParityReport":
        """Return the report of what was measured, decided and found.

        Args:
            notes: why there is no diagnosis, though one was due.
        """
        measured: dict[str, Any] = {}
        for field in dataclasses.fields(ParityFigures):
            measured[field.name] = getattr(figures, field.name)
        measured["notes"] = [*figures.notes, *verdict.notes, *notes]
        return cls(
            **measured,
            verdict="pass" if verdict.passed else "fail",
            reasons=verdict.reasons,
            budget=verdict.budget,
            first_off=verdict.first_off,
            changes=verdict.changes,
            precision=precision,
            diagnosis=diagnosis,
        )

    @property
    def passed(self) -> bool:
        """True if the budget is kept; without a budget, if parity holds."""
        return self.verdict == "pass"

    @property
    def outcome(self) -> str:
        """PASS, FAIL, or DIFFERENT: a fail of a candidate that does not claim to be the same model."""
        if self.passed:
            return "PASS"
        is_fault = self.exact or self.budget or self.changes or self.nan
        return "FAIL" if is_fault else "DIFFERENT"

    def to_dict(self) -> dict[str, Any]:
        """Return the report in JSON's own types; a number that is not finite is null."""
        return finite(dataclasses.asdict(self))

    def to_html(self, path: str | Path) -> None:
        """Write the report as one self-contained page."""
        from minigpt.report.page import report_page

        write_atomically(path, report_page(self.to_dict()))

    def __repr__(self) -> str:
        return f"<ParityReport {self.outcome}: {self.model if self.norm == 'its own' else self._with_norm()}>"

    def _with_norm(self) -> str:
        return f"{self.norm} at {', '.join(self.sites)} in {self.model}"

    def __str__(self) -> str:
        from rich.console import Console

        from minigpt.report.terminal import parity_summary

        console = Console(file=io.StringIO(), width=max(80, Console().width))
        with console.capture() as caught:
            console.print(parity_summary(self.to_dict()))
        return caught.get().rstrip()

    def _repr_html_(self) -> str:
        """Return the page in a frame, for its styles must not reach the notebook."""
        from minigpt.report.page import report_page

        page = html.escape(report_page(self.to_dict()))
        return f'<iframe title="{html.escape(repr(self))}" srcdoc="{page}" width="100%" height="800"></iframe>'
