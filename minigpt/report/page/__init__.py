"""A parity report, or two side by side, as one self-contained HTML page."""

from collections.abc import Sequence
from importlib.resources import files
from string import Template
from typing import Any

from minigpt.report.page.charts import require_matplotlib
from minigpt.report.page.markup import Html, element, fragment
from minigpt.report.page.sections import sections
from minigpt.report.page.verdict import judged, verdict_card
from minigpt.report.reading import Reading, caution, side_by_side

__all__ = ["comparison_page", "report_page", "require_matplotlib"]


def report_page(report: dict[str, Any]) -> str:
    """The whole of an HTML page, which needs no network and no script, in UTF-8.

    Args:
        report: as ``ParityReport.to_dict`` makes it, or read from a JSON file. What it lacks is left out.

    Raises:
        MiniGPTError: matplotlib is not installed, or this is no parity report.
    """
    require_matplotlib()
    reading = Reading.of_report(report)
    title = f"{judged(reading)}: {reading['norm'].text} in {reading['model'].text}"
    return _page(title, [verdict_card(reading)], [reading])


def comparison_page(a: dict[str, Any], b: dict[str, Any]) -> str:
    """Two reports side by side, as ``report_page`` shows one.

    Raises:
        MiniGPTError: matplotlib is not installed, or one of them is no parity report.
    """
    require_matplotlib()
    readings = side_by_side(a, b)
    unlike = caution(*readings)
    norms = " and ".join(reading["norm"].text for reading in readings)
    top = [
        element("h1", "Two norms, side by side", class_="comparison"),
        element("p", unlike, class_="caution") if unlike else None,
        element("div", map(verdict_card, readings), class_="beside"),
    ]
    return _page(f"{norms}, side by side", top, readings)


def _page(title: str, top: Sequence[Html | None], readings: Sequence[Reading]) -> str:
    folder = files(__name__)
    template = Template(folder.joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=fragment(title),
        style=folder.joinpath("page.css").read_text(encoding="utf-8"),
        top=fragment(top),
        sections=fragment(sections(readings)),
    )
