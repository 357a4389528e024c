"""Pages: Jinja2 templates filled with the parts of reports, and with what other rooms show."""

import functools
import re
from collections.abc import Sequence

from jinja2 import ChainableUndefined, Environment, PackageLoader
from markupsafe import Markup

from minigpt.report import charts, numerals, parts
from minigpt.report.fields import MOST_NOISE, Report, perplexities, population
from minigpt.report.parts import Number, Part, checked

SIGNS = {"PASS": "✓", "FAIL": "✗", "DIFFERENT": "≠"}
_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"} | {0x7F: "\u2421"}


def report_page(*reports: Report) -> str:
    """Return an HTML page with these reports, which needs no network and no script.

    Args:
        reports: as ``ParityReport.to_dict`` returns them, or read from JSON files. What one lacks is left out.

    Raises:
        MiniGPTError: if one of them is not a parity report.
    """
    shown = checked(reports)
    if len(shown) == 1:
        title, overview, reasons = f"{shown[0]['outcome']}: {shown[0]['norm']} in {shown[0]['model']}", [], []
    else:
        title, overview, reasons = f"{len(shown)} reports", parts.overview(shown), parts.notes_on(shown)
    return render("parity.html", title=title, reports=shown, overview=overview, reasons=reasons)


def parts_page(title: str, about: str, sections: Sequence[Part]) -> str:
    """Return a page of parts below a title and a sentence."""
    return render("parts.html", title=title, about=about, parts=sections)


def render(template: str, **context: object) -> str:
    """Fill one of the templates. Text is escaped, unless it is ``Markup`` already; what a dict lacks is undefined."""
    return _environment().get_template(template).render(context)


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
        undefined=ChainableUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else "" if value is None else printable(value),
    )
    environment.filters |= {"repr": repr, "with_symbols": with_symbols}
    formats = ("brief", "change", "count", "percent", "precise", "times", "uncertain")
    environment.globals |= {name: getattr(numerals, name) for name in formats} | {
        "MOST_NOISE": MOST_NOISE,
        "SIGNS": SIGNS,
        "Number": Number,
        "at_parting": at_parting,
        "charts": charts,
        "coarse": lambda x: numerals.brief(x, 2),
        "parts_of": parts.parts_of,
        "sentences": parts.sentences,
        "heading": parts.heading,
        "about": parts.about,
        "perplexities": perplexities,
        "population": population,
        "zip": zip,
    }
    return environment


def with_symbols(piece: str) -> str:
    """Show line breaks and tabs as symbols."""
    return piece.replace("\r", "␍").replace("\n", "↵").replace("\t", "⇥")


def at_parting(text: str, other: str) -> tuple[str, str, str]:
    """Split a text into what it shares with another, the word in which they part, and the rest."""
    words, others = re.split(r"(\s+)", text), re.split(r"(\s+)", other)
    parting = (i for i, (one, two) in enumerate(zip(words, others, strict=False)) if one != two)
    shared = next(parting, min(len(words), len(others)))
    while shared < len(words) - 1 and not words[shared].strip():  # white space, or nothing before it, is not a word
        shared += 1
    return "".join(words[:shared]), "".join(words[shared : shared + 1]), "".join(words[shared + 1 :])
