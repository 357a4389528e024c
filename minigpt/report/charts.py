"""Error over depth: lines on a logarithmic scale, which the template ``macros.html`` draws as SVG."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from minigpt.measure.numerals import brief
from minigpt.report.reading import Reading

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

    look: str  # its CSS class. No two of these differ by colour alone
    name: str
    points: list[tuple[float, float | None]]


class Drawn(NamedTuple):
    """A line as paths of SVG."""

    look: str
    name: str
    path: str
    dots: str
    band: str  # the area below it


class Chart(NamedTuple):
    """A drawing with what stands around it. Ticks are a coordinate and a text each."""

    title: str
    about: str  # what it shows, for people who cannot see it
    lines: list[Drawn]
    depths: list[tuple[float, str]]
    errors: list[tuple[float, str]]


class Panel(NamedTuple):
    """What one chart draws of every report."""

    title: str
    members: str  # a list of the report
    key: str  # the name of a member
    error: str
    step: float  # blocks from one member to the next


PANELS = (
    Panel("The residual stream after each block", "blocks", "block", "error", 1.0),
    Panel("The output of each norm", "norm_sites", "site", "propagated_error", 0.5),
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
        [_chart(group, panel, lines[panel], scale) for panel in PANELS if lines[panel]]
        for group, lines in zip(groups, drawn, strict=True)
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
            noise_look = "noise" if look == "first" else "second-noise"
            lines.append(Line(noise_look, f"transformers at {reading['dtype'].text}", noise))
    return lines


def _points(members: Sequence[Reading], quantity: str, panel: Panel) -> list[tuple[float, float | None]]:
    return [(panel.step * i, member[quantity].number) for i, member in enumerate(members)]


def _chart(readings: Sequence[Reading], panel: Panel, lines: list[Line], scale: LogScale) -> Chart:
    deepest = max((list(reading[panel.members]) for reading in readings), key=len)
    ticks = block_ticks([member[panel.key].text for member in deepest], panel.step)
    known = {line.name: [y for _, y in line.points if y is not None] for line in lines}
    told = [f"{name} from {brief(y[0])} to {brief(y[-1])}, at most {brief(max(y))}" for name, y in known.items() if y]
    across = (RIGHT - LEFT) / max(1, panel.step * (len(deepest) - 1))

    def right(depth: float) -> float:
        return round(LEFT + across * depth, 1)

    def down(error: float) -> float:
        return round(FOOT - (FOOT - TOP) * scale.place(error), 1)

    powers = range(round(math.log10(scale.low)), round(math.log10(scale.high)) + 1)
    return Chart(
        panel.title,
        f"{panel.title}, relative RMS error: {'; '.join(told)}.",
        [_drawn(line, [(right(x), down(y)) for x, y in line.points if y is not None]) for line in lines],
        [(right(depth), text) for depth, text in ticks],
        [(down(10.0**power), brief(10.0**power, 1)) for power in powers[:: math.ceil(len(powers) / MOST_TICKS)]],
    )


def _drawn(line: Line, points: list[tuple[float, float]]) -> Drawn:
    path = "M" + "L".join(f"{x} {y}" for x, y in points) if points else ""
    dots = "".join(f"M{x} {y}h0" for x, y in points) if line.look in ("first", "second") else ""
    band = f"{path}V{FOOT}H{points[0][0]}Z" if points and line.look == "noise" else ""
    return Drawn(line.look, line.name, path, dots, band)


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
