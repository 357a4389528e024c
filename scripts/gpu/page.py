"""What the suite found, as Markdown: page.md beside this file is the template."""

from pathlib import Path
from typing import Any

from gpu import parity
from jinja2 import Environment, FileSystemLoader

from minigpt.report.parity_report import MOST_NOISE

Row = dict[str, Any]


def page(results: Row) -> str:
    """Return how it went, and a table for every part."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters["cell"] = _cell
    unable = {(row["dtype"], row["attention"], row["case"]): row for row in results["parity"].get("unable", ())}
    return environment.get_template("page.md").render(
        results,
        MOST_NOISE=MOST_NOISE,
        facts=[{"what": name, "value": value} for name, value in results["environment"].items()],
        parts=[{"part": name} | how for name, how in results["parts"].items()],
        verdicts=parity.verdicts(results["parity"]),
        failures=parity.failures(results["parity"]),
        unable=list(unable.values()),
    )


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/").replace("\n", " ")
