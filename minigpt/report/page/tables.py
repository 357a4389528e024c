"""Tables, and what stands around them."""

from collections.abc import Callable, Iterable, Sequence

from minigpt.report.page.markup import Child, Html, element
from minigpt.report.reading import Reading

Cells = Sequence[Child]


def table(caption: str, head: Cells, rows: Iterable[Cells], class_: str | None = None) -> Html:
    """A table whose first column names its rows. The caption is for who cannot see what stands around it."""
    return element(
        "table",
        element("caption", caption, class_="unseen"),
        element("thead", element("tr", [element("th", cell, scope="col") for cell in head])),
        element("tbody", [_row(cells) for cells in rows]),
        class_=class_,
    )


def _row(cells: Cells) -> Html:
    return element("tr", element("th", cells[0], scope="row"), [element("td", cell) for cell in cells[1:]])


def scrolling(label: str, *children: Child) -> Html:
    """A box that scrolls sideways by itself, by keyboard as well, where its content is wider than the page."""
    return element("div", *children, class_="scroll", tabindex="0", role="region", aria_label=label)


def wide(label: str, head: Cells, rows: Iterable[Cells], class_: str = "figures") -> Html:
    """A table in a box that scrolls, of the same name."""
    return scrolling(label, table(label, head, rows, class_))


def absent() -> Html:
    """In place of what a report does not hold."""
    return element("span", "\u2013", class_="undefined", role="img", aria_label="not measured")


def folded(summary: str, *children: Child) -> Html:
    """What few will ask for, behind its name."""
    return element("details", element("summary", summary), *children)


def heads(readings: Sequence[Reading], alone: str) -> list[str]:
    """The heads of columns of which each is a report's; ``alone`` where there is only one report."""
    return [f"{reading.label} \u00b7 {reading['norm'].text}" if reading.label else alone for reading in readings]


def beside(readings: Sequence[Reading], drawn: Callable[[Reading], Html | None]) -> Html | None:
    """The same thing of each report, side by side where there is room; None where no report has it."""
    parts = [(reading, drawn(reading)) for reading in readings]
    if all(part is None for _, part in parts):
        return None
    if len(parts) == 1:
        return parts[0][1]
    return element(
        "div",
        [element("div", element("h3", head), part or element("p", "not measured", class_="undefined"))
         for head, (_, part) in zip(heads(readings, ""), parts, strict=True)],
        class_="beside",
    )  # fmt: skip
