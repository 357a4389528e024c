"""Pages: Jinja2 templates filled with parity reports, and with what other rooms show."""

import functools
import re
from collections.abc import Iterator
from typing import Any

from jinja2 import ChainableUndefined, Environment, PackageLoader
from markupsafe import Markup

from minigpt.report import numerals
from minigpt.report.charts import LogScale, depth_charts
from minigpt.report.fields import MOST_NOISE, Report, perplexities, population, unit
from minigpt.report.parity_summary import FIGURES, checked, conditions

SIGNS = {"PASS": "✓", "FAIL": "✗", "DIFFERENT": "≠"}
_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"} | {0x7F: "\u2421"}


def report_page(*reports: dict[str, Any]) -> str:
    """Return an HTML page with these reports, which needs no network and no script.

    Args:
        reports: as ``ParityReport.to_dict`` returns them, or read from JSON files. What one lacks is left out.

    Raises:
        MiniGPTError: if one of them is not a parity report.
    """
    shown = checked(reports)
    is_one = len(shown) == 1
    title = f"{shown[0]['outcome']}: {shown[0]['norm']} in {shown[0]['model']}" if is_one else f"{len(shown)} reports"
    return render("parity.html", reports=shown, title=title, is_one=is_one)


def scales_of(report: Report) -> dict[str, Any]:
    """Return the logarithmic scale of each drawing of a report."""

    def numbers(part: str, *keys: str) -> Iterator[float | None]:
        return (row.get(key) for row in report.get(part, ()) for key in keys)

    return {
        "sites": LogScale(numbers("norm_sites", "local_error", "propagated_error")),
        "tokens": LogScale(report.get("tokens", {}).get("kl", ())).decades,
        "removal": LogScale(step["kl_mean"] for step in report.get("removal", {}).get("steps", ())),
        "sensitivity": LogScale(numbers("sensitivity", "rms_error")),
    }


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
        "FIGURES": FIGURES,
        "MOST_NOISE": MOST_NOISE,
        "SIGNS": SIGNS,
        "at_parting": at_parting,
        "conditions": conditions,
        "coarse": lambda x: numerals.brief(x, 2),
        "depth_charts": depth_charts,
        "perplexities": perplexities,
        "population": population,
        "scales_of": scales_of,
        "unit": unit,
        "plain_number": lambda x: f"{x:.0f}",
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
