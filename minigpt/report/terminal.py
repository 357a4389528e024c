"""Verdicts and parts as people read them in a terminal."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from minigpt.report.part import Part

STYLES = {"PASS": "bold green", "FAIL": "bold red", "DIFFERENT": "bold yellow", "NOT JUDGED": "bold"}


def judged(verdict: str, about: str, lines: Sequence[str], parts: Sequence[Part]) -> RenderableType:
    """Return a verdict with what it is about, the sentences on it, and parts."""
    shown: list[RenderableType] = [outcome(verdict, about)]
    for sentence in lines:
        shown.append(Padding(Text(sentence), (0, 0, 0, 2), expand=False))
    return Group(*shown, *printed(parts))


def outcome(word: str, about: str = "") -> Text:
    """Return a verdict in its colour, and what it is about."""
    text = Text(word, style=STYLES[word])
    if about:
        text.append(f"  {about}", style="not bold default")
    return text


def printed(sections: Sequence[Part]) -> Iterator[RenderableType]:
    """Yield the title and the table of each part that a terminal shows."""
    for part in sections:
        if part.brief == 0:
            continue
        title = Text(part.title, style="bold")
        yield Text("\n") + title + Text(f". {part.about}")
        has_heads = len(part.heads) > 2
        table = Table(*part.heads, show_header=has_heads, box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for row in part.rows[: part.brief]:
            cells = ["" if cell is None else str(cell) for cell in row]
            table.add_row(*map(Text, cells))  # Text is shown as it is, without markup
        is_cut = part.brief is not None and part.brief < len(part.rows)
        if is_cut and has_heads:
            table.caption = f"{part.brief} of {len(part.rows)}; --html shows all"
            table.caption_justify = "left"
        yield table
