"""A part of a report as data: a title, a sentence, heads and rows. Any room can make one, for terminal and page."""

from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

from minigpt.report.numerals import Form, brief, is_finite, uncertain

MOST_OPEN = 10  # rows of a long table that a page does not fold


class Shown(NamedTuple):
    """The title of a figure, and the function that formats it. ``shown`` reads them from a field's type."""

    title: str
    form: Form = brief


def shown(kind: type) -> dict[str, Shown]:
    """Return the figures of a class by their names, in the order in which they are shown."""
    hints = get_type_hints(kind, include_extras=True).items()
    return {name: note for name, hint in hints for note in getattr(hint, "__metadata__", ())}


class Number(NamedTuple):
    """A figure and how it is shown."""

    value: float | None
    form: Form = brief
    error: float | None = None  # its standard error

    @property
    def is_finite(self) -> bool:
        return is_finite(self.value)

    def __str__(self) -> str:
        return uncertain(self.value, self.error, self.form)


Cell = Number | str | None  # None: it was not measured
KeyFigure = tuple[str, Number, str]


class Part(NamedTuple):
    """A part of a report: a table, and on the page a drawing.

    Attributes:
        name: of its section on the page.
        about: a sentence.
        brief: how many rows a terminal shows; None: all.
        drawing: the template that draws ``data`` above the table.
        bars: the column that the page also shows as bars.
        folded: the summary under which the page folds the table; empty if it is open.
    """

    name: str
    title: str
    about: str
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[Cell]] = ()
    brief: int | None = None
    drawing: str | None = None
    data: Any = None
    bars: int | None = None
    folded: str = ""

    @property
    def tables(self) -> list[tuple[Sequence[Sequence[Cell]], str]]:
        """The rows in one or two tables of a page, each with the summary under which it is folded, or none."""
        if not self.rows:
            return []
        if self.folded or self.drawing:
            return [(self.rows, self.folded or "In figures")]
        if len(self.rows) <= MOST_OPEN + 6:
            return [(self.rows, "")]
        rest = self.rows[MOST_OPEN:]
        return [(self.rows[:MOST_OPEN], ""), (rest, f"The other {len(rest)}")]


class Sheet(NamedTuple):
    """A head, and parts below it.

    Attributes:
        kind: PASS, FAIL, DIFFERENT or NOT JUDGED, for the sign before the heading; empty for none.
        subject: the line above the heading; ``about`` and ``sentences`` are below it.
        summary: names a sheet that is folded.
        tiles: the most important figures: a name, a number, and the words below it.
    """

    heading: str
    parts: Sequence[Part]
    kind: str = ""
    subject: str = ""
    about: str = ""
    sentences: Sequence[str] = ()
    tiles: Sequence[KeyFigure] = ()
    summary: str = ""


def cell(figures: Any, key: str, form: Form = brief) -> Cell:
    """Return a figure with its standard error; None if it was not measured."""
    if figures is None:
        return None
    value = getattr(figures, key)
    if value is None:
        return None
    error = getattr(figures, f"{key}_se", None)
    return Number(value, form, error)


def cells(kind: type, figures: Any) -> list[Cell]:
    """Return the figures of a class as the cells of a row."""
    return [cell(figures, key, figure.form) for key, figure in shown(kind).items()]


def titles(kind: type) -> list[str]:
    """Return the titles of the figures of a class, which head their columns."""
    return [figure.title for figure in shown(kind).values()]
