"""Charts of the page: errors on logarithmic scales, as maps of the norm sites and as lines over depth."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from minigpt.report.numerals import Form, brief, is_finite

WIDTH, HEIGHT = 380, 232  # of a chart, in the units of the drawing: a CSS pixel on a phone
LEFT, RIGHT, TOP, FOOT = 58, 358, 12, 196  # of its lines
MOST_TICKS = 7
MOST_ACROSS = 12  # blocks in a row of a map

ChartRow = Mapping[str, Any]  # of a list of the report


class LogScale:
    """Places positive numbers between 0 and 1 by their logarithm; zero is at 0, a number that is not finite at 1."""

    def __init__(self, numbers: Iterable[float | None]) -> None:
        positive = [x for x in numbers if is_finite(x) and x > 0]
        self.low, self.high = min(positive, default=1.0), max(positive, default=1.0)

    def place(self, x: float | None) -> float:
        """Return where a number lies, from 0 to 1."""
        if not is_finite(x):
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


class Maps(NamedTuple):
    """Maps of the norm sites, a map for each of some fields, on one scale.

    Attributes:
        titles: of the maps, by field.
        form: of the numbers.
        dtype: at which transformers' errors are drawn below the maps.
        blocks: whose errors are drawn there too.
    """

    sites: Sequence[Any]
    titles: Mapping[str, str]
    form: Form
    dtype: str = ""
    blocks: Sequence[ChartRow] = ()

    @property
    def scale(self) -> LogScale:
        """The scale of all maps."""
        return LogScale(site.get(field) for site in self.sites for field in self.titles)

    @property
    def charts(self) -> list["Chart"]:
        """The charts below the maps."""
        return depth_charts(self.dtype, self.blocks, self.sites)


class Band(NamedTuple):
    """Some blocks of a map: their numbers, and for each norm of a block its name and the sites across."""

    blocks: list[str]
    rows: list[tuple[str, list[ChartRow | None]]]


def site_map(sites: Sequence[Any]) -> tuple[list[Band], list[ChartRow]]:
    """Place sites by the number in their path: blocks across, in bands; and return the sites in no block."""
    blocks: dict[str, dict[str, ChartRow]] = {}
    names: dict[str, None] = {}  # of the norms in a block, in their order
    apart = []
    for site in sites:
        match = re.search(r"\.(\d+)\.(.+)$", site["site"])
        if match is None:
            apart.append(site)
            continue
        number, name = match.groups()
        blocks.setdefault(number, {})[name] = site
    for norms in blocks.values():
        names |= dict.fromkeys(norms)
    numbers = list(blocks)
    most_bands = math.ceil(len(numbers) / MOST_ACROSS) or 1
    across = math.ceil(len(numbers) / most_bands) or 1
    bands = []
    for first in range(0, len(numbers), across):
        some = numbers[first : first + across]
        rows = [(name, [blocks[number].get(name) for number in some]) for name in names]
        bands.append(Band(some, rows))
    return bands, apart


class Line(NamedTuple):
    """A line of a chart."""

    look: str  # its CSS class. No two of these differ by colour alone
    name: str
    points: list[tuple[float, float]]

    @property
    def path(self) -> str:
        """The line in SVG's words."""
        return "M" + "L".join(f"{x} {y}" for x, y in self.points)


class Chart(NamedTuple):
    """A drawing with its axes and titles. Ticks are a coordinate and a text each."""

    title: str
    lines: list[Line]
    depths: list[tuple[float, str]]
    errors: list[tuple[float, str]]


def depth_charts(dtype: str, blocks: Sequence[ChartRow], sites: Sequence[ChartRow]) -> list[Chart]:
    """Draw the errors after each block and of each norm's output, both on one scale."""
    panels = (
        ("The residual stream after each block", "block", "error", blocks),
        ("The output of each norm", "site", "propagated_error", sites),
    )
    numbers = []
    for _, _, error, rows in panels:
        for row in rows:
            numbers += [row.get(error), row.get("noise")]
    scale = LogScale(numbers).decades
    ticks = error_ticks(scale)
    charts = []
    for title, place, error, rows in panels:
        across = (RIGHT - LEFT) / max(1, len(rows) - 1)
        lines = []
        for look, name, key in (
            ("first", "this model", error),
            ("noise", f"transformers at {dtype}", "noise"),
        ):
            points = []
            for i, row in enumerate(rows):
                if row.get(key) is not None:
                    points.append((round(LEFT + across * i, 1), _down(scale, row[key])))
            if points:
                lines.append(Line(look, name, points))
        depths = []
        for i, text in depth_ticks([row[place] for row in rows]):
            depths.append((round(LEFT + across * i, 1), text))
        if lines:
            charts.append(Chart(title, lines, depths, ticks))
    return charts


def error_ticks(scale: LogScale) -> list[tuple[float, str]]:
    """Return heights and texts of the powers of ten on a scale of whole decades, as many as there is room for."""
    lowest = round(math.log10(scale.low))
    highest = round(math.log10(scale.high))
    every = math.ceil((highest - lowest + 1) / MOST_TICKS)
    ticks = []
    for power in range(lowest, highest + 1, every):
        error = 10.0**power
        ticks.append((_down(scale, error), brief(error, 1)))
    return ticks


def _down(scale: LogScale, x: float | None) -> float:
    height = (FOOT - TOP) * scale.place(x)
    return round(FOOT - height, 1)


def depth_ticks(places: Sequence[str]) -> list[tuple[int, str]]:
    """Number the first place of each block and name those in no block, as many as there is room for, and the last."""
    ticks: dict[str, int] = {}  # the first place of each name
    for i, place in enumerate(places):
        match = re.search(r"\.(\d+)", place)
        name = place if match is None else match[1]
        ticks.setdefault(name, i)
    numbered = [(i, name) for name, i in ticks.items()]
    every = math.ceil(len(numbered) / MOST_TICKS) or 1
    room = 0.7 * every * len(places) / max(1, len(numbered))
    shown = []
    for i, name in numbered[::every]:
        last, _ = numbered[-1]
        if last - i >= room:
            shown.append((i, name))
    return shown + numbered[-1:]
