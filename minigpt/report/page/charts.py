"""Lines on a logarithmic scale, drawn by matplotlib as SVG in the colours and the font of the page around it."""

import io
import math
import re
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from minigpt.errors import MiniGPTError
from minigpt.report.page.figures import LogScale
from minigpt.report.page.markup import Html, element, printable

WIDTH, HEIGHT = 380, 232  # of the drawing, in its own units: one is a CSS pixel on a phone
TEXT = 11

# Drawn in stand-in colours, which then become the page's own.
COLOURS = {
    "#010101": "var(--ink)", "#020202": "var(--muted)", "#030303": "var(--line)", "#040404": "var(--paper)",
    "#050505": "var(--accent)", "#060606": "var(--band)",
}  # fmt: skip
INK, MUTED, LINE, PAPER, ACCENT, BAND = COLOURS

# How each kind of line looks: no two differ by colour alone.
LOOKS: dict[str, dict[str, Any]] = {
    "first": dict(color=ACCENT, linewidth=1.8, marker="o", markersize=4.5),
    "second": dict(color=INK, linewidth=1.3, marker="s", markersize=4.5, markerfacecolor=PAPER),
    "others": dict(color=ACCENT, linewidth=1.1, linestyle=(0, (1, 2))),
    "opening": dict(color=ACCENT, linewidth=1.1, linestyle=(0, (6, 2, 1, 2))),
    "noise": dict(color=MUTED, linewidth=1.1, linestyle=(0, (4, 3))),
    "second noise": dict(color=MUTED, linewidth=1.1, linestyle=(0, (1, 2.5))),
}


class Tick(NamedTuple):
    """A named place on the horizontal axis."""

    place: float
    name: str


class Line(NamedTuple):
    """Values over depth; None where there is none."""

    look: str
    name: str
    points: list[tuple[float, float | None]]


def require_matplotlib() -> None:
    """Refuse to draw without matplotlib.

    Raises:
        MiniGPTError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MiniGPTError(
            "charts are drawn by matplotlib, which is not installed; pip install 'minigpt[page]' brings it"
        ) from error


def line_chart(name: str, lines: Sequence[Line], ticks: Sequence[Tick], scale: LogScale, about: str) -> Html:
    """An inline SVG of ``lines`` over depth, the noise as a band below its line.

    Args:
        name: unlike that of any other chart on the page.
        lines: their looks are keys of ``LOOKS``.
        ticks: what the horizontal axis names.
        scale: of the vertical axis, in whole decades. What lies below, such as zero, is drawn at its foot.
        about: what the chart shows, for who does not see it.
    """
    import matplotlib
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": TEXT, "text.parse_math": False}
    with matplotlib.rc_context(style):
        drawing = Figure(figsize=(WIDTH / 72, HEIGHT / 72))
        axes = drawing.add_axes((46 / WIDTH, 36 / HEIGHT, 1 - 58 / WIDTH, 1 - 48 / HEIGHT))
        for line in lines:
            _draw(axes, line, scale)
        _dress(axes, scale, ticks)
        return _inline_svg(drawing, name, about)


def key(look: str) -> Html:
    """A short piece of a line, for a legend."""
    return element("span", class_=f"key {look.replace(' ', '-')}", aria_hidden="true")


def _draw(axes: Any, line: Line, scale: LogScale) -> None:
    x = [place for place, _ in line.points]
    y = [math.nan if value is None else max(value, scale.low) for _, value in line.points]
    if line.look == "noise":
        axes.fill_between(x, scale.low, y, color=BAND, linewidth=0, zorder=0.5)
    behind = "noise" in line.look
    axes.plot(x, y, **LOOKS[line.look], clip_on=False, zorder=1.5 if behind else 3, solid_joinstyle="round")
    at_foot = [(a, b) for (a, value), b in zip(line.points, y, strict=True) if value is not None and value < scale.low]
    if at_foot and not behind:
        axes.plot(*zip(*at_foot, strict=True), linestyle="", marker="v", color=MUTED, clip_on=False, zorder=4)


def _dress(axes: Any, scale: LogScale, ticks: Sequence[Tick]) -> None:
    """The scales, few words and fewer rules."""
    axes.set_yscale("log", nonpositive="mask")
    axes.set_ylim(scale.low, scale.high)
    powers = range(round(math.log10(scale.low)), round(math.log10(scale.high)) + 1)
    shown = list(powers)[:: math.ceil(len(powers) / 7)]
    axes.set_yticks([10.0**power for power in shown], [_power_of_ten(power) for power in shown], color=MUTED)
    axes.set_yticks([], minor=True)
    axes.set_xticks([place for place, _ in ticks], [printable(name) for _, name in ticks], color=MUTED)
    axes.grid(axis="y", color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, pad=7)
    axes.set_xlabel("block", color=MUTED, labelpad=3)
    for side in axes.spines.values():
        side.set_visible(False)


def _power_of_ten(power: int) -> str:
    return {0: "1", 1: "10", 2: "100", -1: "0.1", -2: "0.01"}.get(power, f"1e{power}")


def _inline_svg(drawing: Any, name: str, about: str) -> Html:
    """What matplotlib writes, as an element of a page: no prolog, no metadata, no style of its own, ids of its own."""
    written = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of glyphs that its fonts lack: the browser's will write them
        drawing.savefig(written, format="svg", transparent=True, metadata=nothing)
    svg = written.getvalue()
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<style.*?</style>|<metadata>.*?</metadata>|<defs>\s*</defs>", "", body, flags=re.S)
    body = re.sub(r"font-family: [^;\"]*;? ?", "", body)
    body = re.sub(r'<g id="[^"]*"', "<g", body).replace("xlink:href", "href")
    body = re.sub(r'( id="|href="#|url\(#)', rf"\1{name}-", body)
    for colour, of_page in COLOURS.items():
        body = body.replace(colour, of_page)
    body = re.sub(r"\s*\n\s*", " ", body[body.index(">") + 1 : body.rindex("</svg>")])
    return element(
        "svg", Html(body.strip()), class_="chart", viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=about
    )
