"""Error through depth: the residual stream after each block and the output of each norm, against the noise band."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from minigpt.report.numerals import brief
from minigpt.report.page.charts import Line, Tick, key, line_chart
from minigpt.report.page.figures import LogScale, figure
from minigpt.report.page.heat import place
from minigpt.report.page.markup import Child, Html, element
from minigpt.report.page.tables import folded, heads, wide
from minigpt.report.reading import Reading

MOST_TICKS = 7

COLUMNS = {"error": "error", "error_first": "first token", "error_rest": "other tokens", "noise": "transformers itself"}


class Panel(NamedTuple):
    """What one chart shows: a list of the report, the name and the error of its members, the blocks between two."""

    name: str
    title: str
    members: str
    key: str
    error: str
    step: float


PANELS = (
    Panel("residual", "The residual stream after each block", "blocks", "block", "error", 1.0),
    Panel("norms", "The output of each norm", "norm_sites", "site", "propagated_error", 0.5),
)


def depth_charts(readings: Sequence[Reading]) -> Html | None:
    """Both panels on one scale, all reports in each; None where no report has a positive error."""
    lines = {panel: _lines(readings, panel) for panel in PANELS}
    errors = [error for drawn in lines.values() for line in drawn for _, error in line.points]
    if not any(errors):
        return None
    scale = LogScale(errors).decades
    figures = [_figure(readings, panel, lines[panel], scale) for panel in PANELS if lines[panel]]
    return element("div", figures, class_="beside charts")


def blocks_in_figures(reading: Reading) -> Html | None:
    """What the first panel shows, folded away; None where the report has no blocks."""
    blocks = list(reading["blocks"])
    if not blocks:
        return None
    columns = [column for column in COLUMNS if any(column in block for block in blocks)]
    rows: list[list[Child]] = [[block["block"].text, *(figure(block[name]) for name in columns)] for block in blocks]
    head = ["block", *(COLUMNS[column] for column in columns)]
    title = f"Every block in figures{f' ({reading.label})' if reading.label else ''}"
    return folded(title, wide(title, head, rows))


def _lines(readings: Sequence[Reading], panel: Panel) -> list[Line]:
    """One of each report, and one of each noise that is not drawn already."""
    lines: list[Line] = []
    for look, reading in zip(("first", "second"), readings, strict=False):
        members = list(reading[panel.members])
        if not members:
            continue
        name = heads([reading], "this model")[0]
        noise = _points(members, "noise", panel)
        lines.append(Line(look, name, _points(members, panel.error, panel)))
        if len(readings) == 1:
            lines += _by_position(members, panel)
        if any(y is not None for _, y in noise) and noise not in [line.points for line in lines]:
            noise_look = "noise" if look == "first" else "second noise"
            lines.append(Line(noise_look, f"transformers at {reading['dtype'].text}", noise))
    return lines


def _points(members: Sequence[Reading], quantity: str, panel: Panel) -> list[tuple[float, float | None]]:
    return [(panel.step * i, member[quantity].number) for i, member in enumerate(members)]


def _by_position(members: Sequence[Reading], panel: Panel) -> list[Line]:
    """The first token and the others apart: the first may carry so much that it hides the error of the others."""
    stem = panel.error.removesuffix("_error")
    return [
        Line(look, name, _points(members, key, panel))
        for look, name, key in (("others", "other tokens", f"{stem}_rest"), ("opening", "first token", f"{stem}_first"))
        if any(key in member for member in members)
    ]


def _figure(readings: Sequence[Reading], panel: Panel, lines: list[Line], scale: LogScale) -> Html:
    deepest = max((list(reading[panel.members]) for reading in readings), key=len)
    ticks = block_ticks([member[panel.key].text for member in deepest], panel.step)
    legend = [element("span", key(line.look), line.name) for line in lines]
    return element(
        "figure",
        element("figcaption", panel.title),
        line_chart(panel.name, lines, ticks, scale, _told(panel, lines)),
        element("p", legend, class_="legend"),
    )


def block_ticks(names: Sequence[str], step: float) -> list[Tick]:
    """The numbers of the blocks, as many as there is room for, and whatever stands outside the blocks by its name."""
    blocks: dict[int, Tick] = {}
    apart: list[Tick] = []
    for i, name in enumerate(names):
        block = place(name).block
        if block is None:
            apart.append(Tick(step * i, name))
        else:
            blocks.setdefault(block, Tick(step * i, str(block)))
    every = math.ceil(len(blocks) / MOST_TICKS) or 1
    room = min((tick.place for tick in apart), default=math.inf) - 0.7 * every
    return [*(tick for tick in list(blocks.values())[::every] if tick.place <= room), *apart]


def _told(panel: Panel, lines: Sequence[Line]) -> str:
    """The chart in a sentence."""
    told = []
    for line in lines:
        known = [y for _, y in line.points if y is not None]
        if known:
            told.append(f"{line.name} from {brief(known[0])} to {brief(known[-1])}, at most {brief(max(known))}")
    return f"{panel.title}, relative RMS error: {'; '.join(told)}."
