"""A study as one page, with pictures that matplotlib draws as SVG."""

import io
import itertools
import math
import os
import statistics
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from minigpt.choices import words_of
from minigpt.errors import ConfigError, listing, to_install
from minigpt.report.page import VERDICT_SIGNS, render
from minigpt.report.part import Cell, Number, Part, Sheet
from minigpt.study import table
from minigpt.study.study import CellRow

# Each is at least 3:1 against the page's paper, light and dark. Lines differ by their dashes too.
COLOURS = ("#0e8a94", "#c8662a", "#7a72c9", "#b0823a", "#c4568f", "#5c8f3f", "#4f86c6", "#8a8178")
DASHES = ("solid", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
INK, GRID = "#4a4f55", "#c9c6c0"  # as drawn; on the page they follow its scheme
MOST_UNBROKEN = 32  # characters of a pattern or a file's name that stay on one line of a table
FIGURE_WIDTH, CURVES_HEIGHT = 5.2, 3.1  # inches of 72 units

MEANING = (
    "± is one standard error, over the seeds or over the rows of the text, as the head of a column says. Losses, "
    "entropy and KL divergence, KL(original ‖ model), are in nats a token; the same top token is the share of "
    "positions at which both models have the same likeliest token. At the swap, figures compare the model with the "
    "original, as minigpt parity does. The held-out loss is the logarithm of the perplexity. The control is the model "
    "with its own norms after the same training. Over the control is the loss minus the control's, seed with seed and "
    "row with row."
)
WENT_WRONG = "A cell that failed runs again when the study is started again."
WAS_DONE = "Settings that all cells share. Files are named with the first digits of their SHA-256."
RUN_AGAIN = "Each command makes one cell anew. The control is a cell of its own, with its own command."
ABOUT_ERRORS = "The mean, and one standard error to each side where it is known."
CAPTIONS = {  # titles of the figures, and what they show
    "loss": (
        "Held-out loss against steps",
        "A band is one standard error over the seeds. A short mark at the foot is a step at which norms were swapped.",
    ),
    "over-baseline": ("Loss over the control", ABOUT_ERRORS),
    "kl-mean": ("KL divergence from the original", ABOUT_ERRORS),
}
STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "minigpt", "font.size": 9, "font.family": "DejaVu Sans",
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
    "grid.color": GRID, "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip


def page(rows: list[CellRow], title: str, out: Path, html: Path, command: str = "") -> str:
    """Return one self-contained page: what was done, sortable tables, and the figures if matplotlib is installed.

    It leads to the parity reports that ``out`` has; without them it has no links.
    """
    summaries = table.summarize(rows)
    reports = Reports(out, os.path.relpath(out, html.parent or "."))
    parts = _tables(summaries, reports)
    parts.append(_reasons(summaries))
    parts += _figure_parts(rows)
    parts.append(Part("protocol", "What was done", WAS_DONE, ("", "value"), table.protocol(rows, command)))
    parts.append(_commands(summaries))
    models = listing({str(cell.settings["model"]) for cell in summaries.cells})
    sheet = Sheet(title, [part for part in parts if part.rows or part.drawing], subject=models, about=MEANING)
    return render(f"{title}: {models}", [sheet], "study.html")


@dataclass(frozen=True)
class Reports:
    """The parity reports of a study.

    Attributes:
        out: the study's folder.
        address: of that folder, as the page says it.
    """

    out: Path
    address: str

    def link(self, cell: table.Summary) -> Markup:
        """Return the outcome of a cell as a link to its report, or as text if there is no report."""
        report = cell.settings["report"]
        if report and (self.out / report).exists():
            return Markup('<a href="{}/{}">{}</a>').format(self.address, report, cell.outcome)
        return Markup("{}").format(cell.outcome)


def _tables(summaries: table.Summaries, reports: Reports) -> list[Part]:
    """Return a table for each stage of the study."""
    parts = []
    for stage, columns in table.stages(summaries).items():
        heads = ["norm", "verdict", *map(summaries.head, columns)]
        cells = [_table_row(summaries, cell, columns, reports) for cell in summaries.cells]
        parts.append(Part(stage.lower().replace(" ", "-"), stage, "", heads, cells))
    return parts


def _table_row(summaries: table.Summaries, cell: table.Summary, columns: list[str], reports: Reports) -> list[Cell]:
    label = _unbroken(summaries.label(cell))
    named = Markup("<bdi>{}</bdi><small>{}</small>").format(cell.settings["norm"], label)
    sign = VERDICT_SIGNS.get(cell.outcome, "✗")
    verdict = Markup("{}&nbsp;{}").format(sign, reports.link(cell))
    row: list[Cell] = [named, verdict]
    return row + [cell.figures[name] for name in columns]


def _reasons(summaries: table.Summaries) -> Part:
    rows = []
    for cell in summaries.cells:
        for reason in cell.reasons:
            rows.append((cell.settings["norm"], reason))
    return Part("reasons", "What went wrong", WENT_WRONG, ("norm", "reason"), rows)


def _commands(summaries: table.Summaries) -> Part:
    rows = []
    for cell in summaries.cells:
        for command in cell.commands:
            rows.append((cell.settings["norm"], command))
    return Part("commands", "Run a cell again", RUN_AGAIN, ("norm", "command"), rows, folded="Commands")


def _figure_parts(rows: list[CellRow]) -> list[Part]:
    """Return the figures; none if matplotlib is not installed."""
    try:
        drawn = figures(rows)
    except ConfigError:
        return []
    parts = []
    for name, svg in drawn.items():
        caption, about = CAPTIONS[name]
        parts.append(Part(name, caption, about, drawing="figure", data=_inline(svg)))
    return parts


def _unbroken(label: str) -> Markup:
    """Return a label that breaks between its words and patterns, and inside of those only that are very long."""
    words: list[Markup] = []
    for word in _spaced(label).split():
        form = Markup("{}")
        if len(word) <= MOST_UNBROKEN:
            form = Markup('<span class="whole">{}</span>')
        words.append(form.format(word))
    return Markup(" ").join(words)


def _spaced(label: str) -> str:
    """Return a label with a space after each comma, where a line may end."""
    return ", ".join(words_of(label))


def _wrapped(label: str, width: int) -> str:
    """Return a label in lines of at most so many characters. A pattern's hyphen ends none."""
    return "\n".join(textwrap.wrap(_spaced(label), width, break_on_hyphens=False))


def figures(rows: list[CellRow]) -> dict[str, str]:
    """Return SVG pictures by name: curves of the held-out loss, and each cell's most telling figure.

    Raises:
        ConfigError: if matplotlib is not installed.
    """
    summaries = table.summarize(rows)
    labels = []
    for cell in summaries.cells:
        settings = (cell.settings["norm"], summaries.label(cell))  # the latter are those that vary
        labels.append(", ".join(filter(None, settings)))
    drawn: dict[str, str] = {}
    name = "kl_mean"
    if summaries.is_trained:
        name = "over_baseline"
        height = CURVES_HEIGHT + 0.17 * len(labels)
        drawn["loss"] = _drawn(lambda axes: _curves(axes, summaries.cells, labels), height)
    cells = []
    for label, cell, colour in zip(labels, summaries.cells, itertools.cycle(COLOURS), strict=False):
        figure = cell.figures[name]
        if figure is not None:
            cells.append((label, figure, colour))
    if cells:
        column = summaries.columns[name]
        drawn[name.replace("_", "-")] = _drawn(lambda axes: _cells(axes, cells, column), 0.7 + 0.35 * len(cells))
    return drawn


def _drawn(draw: Callable[[Any], None], height: float) -> str:
    """Return the SVG of what ``draw`` draws, so many inches high."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure as Canvas
    except ModuleNotFoundError as error:
        message = f"figures need matplotlib, which is not installed; {to_install('plots')}"
        raise ConfigError(message) from error
    with mpl.rc_context(STYLE):
        canvas = Canvas((FIGURE_WIDTH, height), layout="constrained")
        draw(canvas.add_subplot())
        file = io.StringIO()
        canvas.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return file.getvalue()


def _curves(axes: Any, cells: list[table.Summary], labels: list[str]) -> None:
    """Draw the loss over the steps, a band of one standard error over seeds around each mean, and ticks at swaps."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    for cell, label, colour, dash in zip(
        cells, labels, itertools.cycle(COLOURS), itertools.cycle(DASHES), strict=False
    ):
        steps, losses = _losses_by_step(cell.curves)
        if not steps:
            continue
        means = losses.mean(1)
        axes.plot(steps, means, color=colour, linestyle=dash, linewidth=1.5, label=_wrapped(label, 70))
        seeds = losses.shape[1]
        if seeds > 1:
            errors = losses.std(1, ddof=1) / math.sqrt(seeds)
            axes.fill_between(steps, means - errors, means + errors, color=colour, alpha=0.25, linewidth=0)
        swaps = sorted(set(cell.settings["swaps"].values()))
        axes.plot(swaps, [0.02] * len(swaps), "|", color=colour, transform=axes.get_xaxis_transform(), markersize=6)
    axes.set(xlabel="step", ylabel=f"{table.TRAINED['loss'].head}, nats a token", yscale="log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7), numticks=12))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(visible=True, linewidth=0.5)
    axes.figure.legend(loc="outside lower left", frameon=False, fontsize=8)


def _losses_by_step(curves: list[list[list[float]]]) -> tuple[list[float], Any]:
    """Return the steps at which all seeds have a loss, and these losses: an array (steps, seeds)."""
    steps = []
    losses = []
    for points in zip(*curves, strict=False):  # one of each seed, [step, loss]
        at_step = [loss for _, loss in points]
        if None not in at_step:
            steps.append(points[0][0])
            losses.append(at_step)
    return steps, np.array(losses)


def _cells(axes: Any, cells: list[tuple[str, Number, str]], column: table.Column) -> None:
    """Draw a figure of each cell with its standard error, from its label, its figure and its colour."""
    _scale(axes, [abs(figure.value or 0.0) for _, figure, _ in cells], column)
    style = {"fmt": "o", "markersize": 4, "capsize": 3, "linewidth": 1.2}
    labels = []
    for place, (label, figure, colour) in enumerate(cells):
        labels.append(_wrapped(label, 34))
        axes.errorbar(figure.value, place, xerr=figure.error or 0.0, color=colour, **style)
    if column.is_difference:
        axes.axvline(0, color=INK, linewidth=0.8)
    axes.set(yticks=range(len(cells)), xlabel=column.title, ylim=(len(cells) - 0.5, -0.5))
    axes.set_yticklabels(labels, fontsize=8)
    axes.grid(visible=True, axis="x", linewidth=0.5)


def _scale(axes: Any, sizes: list[float], column: table.Column) -> None:
    """Choose a scale on which a bad cell does not put all others on 0."""
    from matplotlib.ticker import MaxNLocator

    middle = statistics.median(sizes) or min(filter(None, sizes), default=1.0)
    if not column.is_difference and min(sizes) > 0:
        axes.set_xscale("log")
    elif max(sizes) > 30 * middle:
        axes.set_xscale("symlog", linthresh=10 ** math.ceil(math.log10(middle)))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5))


def _inline(svg: str) -> Any:
    """Return a picture as a part of a page, in the colours of its scheme."""
    body = svg[svg.index("<svg") :]
    body = body.replace(INK, "currentColor").replace(GRID, "var(--line)")
    return Markup(body.replace("'DejaVu Sans'", "inherit"))  # matplotlib escapes what it writes
