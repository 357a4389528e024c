"""Parts of reports as people read them in a terminal."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from minigpt.report import overview, parts
from minigpt.report.fields import ParityFields
from minigpt.report.parts import Part

STYLES = {"PASS": "bold green", "FAIL": "bold red", "DIFFERENT": "bold yellow"}


def parity_summary(report: ParityFields) -> RenderableType:
    """Return the verdict with its reasons, and the parts of a report.

    Args:
        report: made by a judgement, or read from a JSON file.
    """
    headline = outcome(report.outcome, f"{parts.heading(report)}: {parts.about(report)}")
    sentences = (Padding(Text(sentence), (0, 0, 0, 2), expand=False) for sentence in parts.sentences(report))
    return Group(headline, *sentences, *printed(parts.parts_of(report)))


def reports_table(reports: Sequence[ParityFields]) -> RenderableType:
    """Return one table with a row for each report, and the first reason of those that fail."""
    return Group(*printed(overview.tables_of(reports)), *map(Text, overview.notes_on(reports)))


def outcome(word: str, about: str = "") -> Text:
    """Return a verdict in its colour, and what it is about."""
    return Text(word, style=STYLES[word]).append(f"  {about}" if about else "", style="not bold default")


def printed(sections: Sequence[Part]) -> Iterator[RenderableType]:
    """Yield the title and the table of each part that a terminal shows."""
    for part in sections:
        if part.brief != 0:
            yield Text("\n") + Text(part.title, style="bold") + Text(f". {part.about}")
            yield _table(part)


def _table(part: Part) -> Table:
    table = Table(*part.heads, show_header=len(part.heads) > 2, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for row in part.rows[: part.brief]:
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    if part.brief is not None and part.brief < len(part.rows) and len(part.heads) > 2:
        table.caption, table.caption_justify = f"{part.brief} of {len(part.rows)}; --html shows all", "left"
    return table
