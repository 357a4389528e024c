"""Error over depth, drawn by matplotlib as SVG in the colours and the font of the page around it."""

import io
import math
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from minigpt.errors import MiniGPTError
from minigpt.measure.numerals import brief
from minigpt.report.reading import Reading

WIDTH, HEIGHT = 380, 232  # of the drawing, in its own units: one is a CSS pixel on a phone
TEXT = 11
MOST_TICKS = 7

# matplotlib draws in stand-in colours, which are then replaced by the page's own.
COLOURS = {
    "#010101": "var(--ink)", "#020202": "var(--muted)", "#030303": "var(--line)", "#040404": "var(--paper)",
    "#050505": "var(--accent)", "#060606": "var(--band)",
}  # fmt: skip
INK, MUTED, LINE, PAPER, ACCENT, BAND = COLOURS

# How each kind of line looks. No two differ by colour alone.
LOOKS: dict[str, dict[str, Any]] = {
    "first": dict(color=ACCENT, linewidth=1.8, marker="o", markersize=4.5),
    "second": dict(color=INK, linewidth=1.3, marker="s", markersize=4.5, markerfacecolor=PAPER),
    "others": dict(color=ACCENT, linewidth=1.1, linestyle=(0, (1, 2))),
    "opening": dict(color=ACCENT, linewidth=1.1, linestyle=(0, (6, 2, 1, 2))),
    "noise": dict(color=MUTED, linewidth=1.1, linestyle=(0, (4, 3))),
    "second noise": dict(color=MUTED, linewidth=1.1, linestyle=(0, (1, 2.5))),
}

_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"} | {0x7F: "\u2421"}


def printable(text: object) -> str:
    """Make control characters and lone surrogates visible, which no page can carry."""
    return str(text).translate(_CONTROLS).encode("utf-8", "replace").decode("utf-8")


def require_matplotlib() -> None:
    """Raise MiniGPTError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MiniGPTError(
            "matplotlib draws the charts and is not installed; install it with pip install 'minigpt[page]'"
        ) from error


class LogScale:
    """Places positive numbers between 0 and 1 by their logarithm; zero is at 0, a number that is not finite at 1."""

    def __init__(self, numbers: Iterable[float | None]) -> None:
        positive = [x for x in numbers if x is not None and x > 0]
        self.low, self.high = min(positive, default=1.0), max(positive, default=1.0)

    def place(self, x: float | None) -> float:
        """Where a number lies, from 0 to 1."""
        if x is None:
            return 1.0
        if x <= 0:
            return 0.0
        if self.high == self.low:
            return 1.0
        return math.log(x / self.low) / math.log(self.high / self.low)

    @property
    def decades(self) -> "LogScale":
        """The same scale, widened to whole powers of ten."""
        low, high = max(-300, math.floor(math.log10(self.low))), math.ceil(math.log10(self.high))
        return LogScale((10.0**low, 10.0 ** max(high, low + 1)))


class Site(NamedTuple):
    """Where a norm or a block stands in the network. ``block`` is None outside all blocks."""

    block: int | None
    name: str

    @classmethod
    def of(cls, name: str) -> "Site":
        """Read "h.3.ln_1" or "ln_f"."""
        found = re.fullmatch(r"h\.(\d+)(?:\.(.+))?", name)
        return cls(int(found[1]), found[2] or "") if found else cls(None, name)


class Line(NamedTuple):
    """Values over depth; None where there is none."""

    look: str  # a key of LOOKS
    name: str
    points: list[tuple[float, float | None]]


class Chart(NamedTuple):
    """A drawing with what stands around it."""

    title: str
    svg: Markup
    lines: list[Line]


class Panel(NamedTuple):
    """What one chart draws of every report."""

    name: str
    title: str
    members: str  # a list of the report
    key: str  # the name of a member
    error: str
    step: float  # blocks from one member to the next


PANELS = (
    Panel("stream", "The residual stream after each block", "blocks", "block", "error", 1.0),
    Panel("norms", "The output of each norm", "norm_sites", "site", "propagated_error", 0.5),
)


def depth_charts(readings: Sequence[Reading]) -> list[list[Chart]]:
    """Draw both panels on one scale: one or two reports in the same charts, more in charts of their own."""
    groups = [readings] if len(readings) <= 2 else [[reading] for reading in readings]
    drawn = [{panel: _lines(group, panel) for panel in PANELS} for group in groups]
    errors = [y for lines in drawn for drawing in lines.values() for line in drawing for _, y in line.points]
    if not any(errors):
        return []
    scale = LogScale(errors).decades
    return [
        [_chart(group, panel, lines[panel], scale, number) for panel in PANELS if lines[panel]]
        for number, (group, lines) in enumerate(zip(groups, drawn, strict=True))
    ]


def _lines(readings: Sequence[Reading], panel: Panel) -> list[Line]:
    """A line for each report, and one for each noise that is not drawn already."""
    lines: list[Line] = []
    for look, reading in zip(("first", "second"), readings, strict=False):
        members = list(reading[panel.members])
        if not members:
            continue
        name = f"{reading.label} · {reading['norm'].text}" if reading.label else "this model"
        lines.append(Line(look, name, _points(members, panel.error, panel)))
        if len(readings) == 1:  # the first token may carry so much that it hides the error of the others
            stem = panel.error.removesuffix("_error")
            apart = (("others", "other tokens", f"{stem}_rest"), ("opening", "first token", f"{stem}_first"))
            lines += [Line(look, name, _points(members, key, panel)) for look, name, key in apart if key in members[0]]
        noise = _points(members, "noise", panel)
        if any(y is not None for _, y in noise) and noise not in [line.points for line in lines]:
            noise_look = "noise" if look == "first" else "second noise"
            lines.append(Line(noise_look, f"transformers at {reading['dtype'].text}", noise))
    return lines


def _points(members: Sequence[Reading], quantity: str, panel: Panel) -> list[tuple[float, float | None]]:
    return [(panel.step * i, member[quantity].number) for i, member in enumerate(members)]


def _chart(readings: Sequence[Reading], panel: Panel, lines: list[Line], scale: LogScale, number: int) -> Chart:
    deepest = max((list(reading[panel.members]) for reading in readings), key=len)
    ticks = block_ticks([member[panel.key].text for member in deepest], panel.step)
    known = {line.name: [y for _, y in line.points if y is not None] for line in lines}
    told = [f"{name} from {brief(y[0])} to {brief(y[-1])}, at most {brief(max(y))}" for name, y in known.items() if y]
    about = f"{panel.title}, relative RMS error: {'; '.join(told)}."
    return Chart(panel.title, line_chart(f"{panel.name}{number or ''}", lines, ticks, scale, about), lines)


def block_ticks(names: Sequence[str], step: float) -> list[tuple[float, str]]:
    """Place the numbers of the blocks, as many as there is room for, and the name of each site outside the blocks."""
    blocks: dict[int, tuple[float, str]] = {}
    apart: list[tuple[float, str]] = []
    for i, name in enumerate(names):
        block = Site.of(name).block
        if block is None:
            apart.append((step * i, name))
        else:
            blocks.setdefault(block, (step * i, str(block)))
    every = math.ceil(len(blocks) / MOST_TICKS) or 1
    room = min((place for place, _ in apart), default=math.inf) - 0.7 * every
    return [*(tick for tick in list(blocks.values())[::every] if tick[0] <= room), *apart]


def line_chart(
    name: str, lines: Sequence[Line], ticks: Sequence[tuple[float, str]], scale: LogScale, about: str
) -> Markup:
    """Draw lines over depth as an inline SVG, the noise as a band below its line.

    Args:
        name: must be unique on the page.
        ticks: what the horizontal axis names.
        scale: of the vertical axis, in whole decades. Smaller values, e.g. zero, are drawn at its foot.
        about: what the chart shows, for people who cannot see it.
    """
    import matplotlib
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": TEXT, "text.parse_math": False}
    with matplotlib.rc_context(style):
        drawing = Figure(figsize=(WIDTH / 72, HEIGHT / 72))
        axes = drawing.add_axes((46 / WIDTH, 36 / HEIGHT, 1 - 58 / WIDTH, 1 - 48 / HEIGHT))
        for line in lines:
            _draw(axes, line, scale)
        _label(axes, scale, ticks)
        return _inline_svg(drawing, name, about)


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


def _label(axes: Any, scale: LogScale, ticks: Sequence[tuple[float, str]]) -> None:
    axes.set_yscale("log", nonpositive="mask")
    axes.set_ylim(scale.low, scale.high)
    powers = range(round(math.log10(scale.low)), round(math.log10(scale.high)) + 1)
    shown = list(powers)[:: math.ceil(len(powers) / 7)]
    names = {0: "1", 1: "10", 2: "100", -1: "0.1", -2: "0.01"}
    axes.set_yticks([10.0**power for power in shown], [names.get(p, f"1e{p}") for p in shown], color=MUTED)
    axes.set_yticks([], minor=True)
    axes.set_xticks([place for place, _ in ticks], [printable(name) for _, name in ticks], color=MUTED)
    axes.grid(axis="y", color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, pad=7)
    axes.set_xlabel("block", color=MUTED, labelpad=3)
    for side in axes.spines.values():
        side.set_visible(False)


def _inline_svg(drawing: Any, name: str, about: str) -> Markup:
    """Turn what matplotlib writes into an element of a page: no prolog, metadata or style, and unique ids."""
    written = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about glyphs that its fonts lack: the browser has them
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
    return Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        WIDTH, HEIGHT, printable(about), Markup(body.strip())
    )
