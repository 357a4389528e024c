"""Pages: Jinja2 templates filled with the parts of reports, and with what other rooms show."""

import functools
from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from minigpt.errors import listing
from minigpt.report import charts, overview, sentences
from minigpt.report.fields import ReportFields
from minigpt.report.noise import MOST_NOISE
from minigpt.report.numerals import brief
from minigpt.report.part import Number, Sheet
from minigpt.report.parts import parts_of

_SYMBOLS = str.maketrans("\r\n\t", "␍↵⇥")
VERDICT_SIGNS = {"PASS": "✓", "FAIL": "✗", "DIFFERENT": "≠", "NOT JUDGED": "?"}


# The visible picture of each control character but tab and line feed, by their code points
_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"} | {0x7F: "\u2421"}


def report_page(*reports: ReportFields) -> str:
    """Return an HTML page with these reports, which needs no network and no script.

    Args:
        reports: made by a judgement, or read from JSON files. What one lacks is left out.
    """
    sheets = [_sheet(report) for report in reports]
    if len(reports) == 1:
        report = reports[0]
        return render(f"{report.outcome}: {sentences.subject(report)}", sheets)
    heading = f"{len(reports)} reports"
    models = listing(overview.models_of(reports))
    first = Sheet(
        heading, overview.tables_of(reports), subject=models, about=f"{overview.outcomes_of(reports)}.",
        sentences=overview.notes_on(reports),
    )  # fmt: skip
    return render(f"{heading}: {models}", [first, *sheets])


def _sheet(report: ReportFields) -> Sheet:
    return Sheet(
        sentences.heading(report),
        parts_of(report),
        report.outcome,
        sentences.subject(report),
        f"{sentences.about(report)}.",
        sentences.sentences(report),
        sentences.tiles(report),
        sentences.pair(report),
    )


def render(title: str, sheets: Sequence[Sheet], template: str = "page.html") -> str:
    """Return a page of sheets. Text is escaped, unless it is ``Markup`` already."""
    page = _environment().get_template(template)
    return page.render(title=title, sheets=sheets)


def framed(title: str, page: str) -> str:
    """Return a page in a frame, since its styles must not reach the notebook that shows it."""
    return f'<iframe title="{escape(title)}" srcdoc="{escape(page)}" width="100%" height="800"></iframe>'


def printable(text: object) -> str:
    """Replace control characters and lone surrogates, which no page can carry."""
    visible = str(text).translate(_CONTROLS)
    return visible.encode("utf-8", "replace").decode("utf-8")


def _finalized(value: object) -> str:
    """Return what a template shows for a value: nothing for None."""
    if isinstance(value, Markup):
        return value
    if value is None:
        return ""
    return printable(value)


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("minigpt.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=_finalized,
    )
    environment.filters |= {"repr": repr, "with_symbols": with_symbols, "dotted": dotted}
    environment.globals |= {
        "MOST_NOISE": MOST_NOISE, "SIGNS": VERDICT_SIGNS, "Number": Number, "charts": charts,
        "brief": brief, "zip": zip,
    }  # fmt: skip
    return environment


def dotted(name: str) -> str:
    """Let a narrow column break the name of a module or Parameter behind its dots."""
    if isinstance(name, Markup):
        return name
    pieces = printable(name).split(".")
    return Markup(".<wbr>").join(pieces)


def with_symbols(piece: str) -> str:
    """Show line breaks and tabs as symbols."""
    return piece.translate(_SYMBOLS)
