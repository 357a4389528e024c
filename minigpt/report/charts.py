"""Error over depth: lines on a logarithmic scale, which the template ``sections.html`` draws as SVG."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from minigpt.report.fields import Report
from minigpt.report.numerals import brief

LEFT, RIGHT, TOP, FOOT = 58, 358, 12, 196  # of the lines, in the units of the drawing: a CSS pixel on a phone
MOST_TICKS = 7


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


class Line(NamedTuple):
    """A line of a chart."""

    look: str  # its CSS class. No two of these differ by colour alone
    name: str
    points: list[tuple[float, float]]


class Chart(NamedTuple):
    """A drawing with what stands around it. Ticks are a coordinate and a text each."""

    title: str
    lines: list[Line]
    depths: list[tuple[float, str]]
    errors: list[tuple[float, str]]


class Panel(NamedTuple):
    """A chart of the members of a list of the report, by their errors."""

    title: str
    part: str
    error: str  # the key of a member's error
    step: float  # blocks from one member to the next


PANELS = (
    Panel("The residual stream after each block", "blocks", "error", 1.0),
    Panel("The output of each norm", "norm_sites", "propagated_error", 0.5),
)


def depth_charts(report: Report) -> list[Chart]:
    """Draw both panels on one scale."""
    scale = LogScale(
        one.get(key) for panel in PANELS for one in report.get(panel.part, ()) for key in (panel.error, "noise")
    ).decades
    return [_chart(report, panel, scale) for panel in PANELS if report.get(panel.part)]


def _chart(report: Report, panel: Panel, scale: LogScale) -> Chart:
    places = report[panel.part]
    layers = int(panel.step * len(places))
    across = (RIGHT - LEFT) / max(1, panel.step * (len(places) - 1))

    def right(depth: float) -> float:
        return round(LEFT + across * depth, 1)

    def down(error: float) -> float:
        return round(FOOT - (FOOT - TOP) * scale.place(error), 1)

    def line(look: str, name: str, key: str) -> Line:
        errors = [place.get(key) for place in places]
        points = [(right(panel.step * i), down(error)) for i, error in enumerate(errors) if error is not None]
        return Line(look, name, points)

    lines = [
        line("first", "this model", panel.error),
        line("noise", f"transformers at {report['dtype']}", "noise"),
    ]
    powers = range(round(math.log10(scale.low)), round(math.log10(scale.high)) + 1)
    return Chart(
        panel.title,
        [line for line in lines if line.points],
        [(right(depth), text) for depth, text in depth_ticks(layers, of_norms=panel.part == "norm_sites")],
        [(down(10.0**power), brief(10.0**power, 1)) for power in powers[:: math.ceil(len(powers) / MOST_TICKS)]],
    )


def depth_ticks(layers: int, *, of_norms: bool) -> list[tuple[float, str]]:
    """Place the numbers of the blocks, as many as there is room for, and of norms ln_f after them."""
    every = math.ceil(layers / MOST_TICKS)
    room = layers - 0.7 * every if of_norms else layers
    blocks = [(float(i), str(i)) for i in range(0, layers, every) if i <= room]
    return [*blocks, (float(layers), "ln_f")] if of_norms else blocks
