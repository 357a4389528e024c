"""Pages: Jinja2 templates filled with the parts of reports, and with what other rooms show."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from minigpt.errors import listing
from minigpt.report import charts, overview, parts
from minigpt.report.fields import MOST_NOISE, ParityFields
from minigpt.report.numerals import brief
from minigpt.report.parts import KeyFigure, Number, Part

VERDICT_SIGNS = {"PASS": "✓", "FAIL": "✗", "DIFFERENT": "≠"}
_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"} | {0x7F: "\u2421"}


class Sheet(NamedTuple):
    """A head, and parts below it.

    Attributes:
        kind: PASS, FAIL or DIFFERENT, for the sign before the heading; empty for none.
        subject: stands above the heading; ``about`` and ``sentences`` stand below it.
        summary: names a sheet that is folded.
        tiles: the most important figures: a name, a number, and what stands beside it.
    """

    heading: str
    parts: Sequence[Part]
    kind: str = ""
    subject: str = ""
    about: str = ""
    sentences: Sequence[str] = ()
    tiles: Sequence[KeyFigure] = ()
    summary: str = ""


def report_page(*reports: ParityFields) -> str:
    """Return an HTML page with these reports, which needs no network and no script.

    Args:
        reports: made by a judgement, or read from JSON files. What one lacks is left out.
    """
    sheets = [_sheet(report) for report in reports]
    if len(reports) == 1:
        return render(f"{reports[0].outcome}: {parts.subject(reports[0])}", sheets)
    heading, models = f"{len(reports)} reports", listing(overview.models_of(reports))
    first = Sheet(
        heading, overview.tables_of(reports), subject=models, about=f"{overview.outcomes_of(reports)}.",
        sentences=overview.notes_on(reports),
    )  # fmt: skip
    return render(f"{heading}: {models}", [first, *sheets])


def _sheet(report: ParityFields) -> Sheet:
    return Sheet(
        parts.heading(report), parts.parts_of(report), report.outcome, parts.subject(report),
        f"{parts.about(report)}.", parts.sentences(report), parts.tiles(report), parts.pair(report),
    )  # fmt: skip


def render(title: str, sheets: Sequence[Sheet], template: str = "page.html") -> str:
    """Return a page of sheets. Text is escaped, unless it is ``Markup`` already."""
    return _environment().get_template(template).render(title=title, sheets=sheets)


def printable(text: object) -> str:
    """Replace control characters and lone surrogates, which no page can carry."""
    return str(text).translate(_CONTROLS).encode("utf-8", "replace").decode("utf-8")


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("minigpt.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else "" if value is None else printable(value),
    )
    environment.filters |= {"repr": repr, "with_symbols": with_symbols, "dotted": dotted}
    environment.globals |= {
        "MOST_NOISE": MOST_NOISE, "SIGNS": VERDICT_SIGNS, "Number": Number, "charts": charts,
        "brief": brief, "zip": zip,
    }  # fmt: skip
    return environment


def dotted(name: str) -> str:
    """Let a narrow column break the name of a module or Parameter behind its dots."""
    return name if isinstance(name, Markup) else Markup(".<wbr>").join(printable(name).split("."))


def with_symbols(piece: str) -> str:
    """Show line breaks and tabs as symbols."""
    return piece.replace("\r", "␍").replace("\n", "↵").replace("\t", "⇥")
