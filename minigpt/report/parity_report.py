"""The object that a judgement returns, which is the JSON of ``minigpt parity``, its terminal summary and its page."""

import dataclasses
import html
import io
from pathlib import Path
from typing import Any

from minigpt.files import finite, write_atomically
from minigpt.report.fields import ParityFields, outcome_of


@dataclasses.dataclass(frozen=True, repr=False)
class ParityReport(ParityFields):
    """Is the candidate still the same model as the original, as transformers computes it?

    ``print`` shows it as the command does, and a notebook as the page of ``--html``. ``minigpt.report.fields``
    describes its parts.
    """

    @property
    def passed(self) -> bool:
        """Whether the budget is kept; if there is none, whether parity holds."""
        return self.verdict == "pass"

    @property
    def outcome(self) -> str:
        """PASS, FAIL, or DIFFERENT, as ``outcome_of`` says."""
        return outcome_of(self)

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
