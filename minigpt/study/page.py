"""A study as one page, with pictures that matplotlib draws as SVG."""

import contextlib
import io
import itertools
import math
import os
import statistics
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from minigpt.choices import words_of
from minigpt.errors import ConfigError, listing
from minigpt.report.page import SIGNS, Sheet, render
from minigpt.report.parts import Cell, Number, Part
from minigpt.study import table
from minigpt.study.study import CellRow

# Each is at least 3:1 against the page's paper, light and dark. Lines differ by their dashes too.
COLOURS = ("#0e8a94", "#c8662a", "#7a72c9", "#b0823a", "#c4568f", "#5c8f3f", "#4f86c6", "#8a8178")
DASHES = ("solid", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
INK, GRID = "#4a4f55", "#c9c6c0"  # as drawn; on the page they follow its scheme
MOST_UNBROKEN = 32  # characters of a pattern or a file's name that stay on one line of a table
WIDTH, HEIGHT = 5.2, 3.1  # inches of 72 units

MEANING = (
    "± is one standard error, over the seeds or over the rows of the text, as the head of a column says. Losses, "
    "entropy and KL divergence, KL(original ‖ model), are in nats a token; the same top token is the share of "
    "positions at which both models have the same likeliest token. At the swap, figures compare the model with the "
    "original, as minigpt parity does. The held-out loss is the logarithm of the perplexity. Over the control is that "
    "loss less the loss of the model's own norms after the same training, seed with seed and row with row."
)
WRONG = "A cell that failed runs again when the study is started again."
DONE = "Settings that all cells share. Files are named with the first digits of their SHA-256."
AGAIN = "Each command makes one cell anew. The control is a cell of its own, with its own command."
OF_ERRORS = "The mean, and one standard error to each side where it is known."
CAPTIONS = {  # titles of the figures, and what they show
    "loss": (
        "Held-out loss against steps",
        "A band is one standard error over the seeds. A short mark at the foot is a step at which norms were swapped.",
    ),
    "over-baseline": ("Loss over the control", OF_ERRORS),
    "kl-mean": ("KL divergence from the original", OF_ERRORS),
}


def page(rows: list[CellRow], title: str, out: Path, html: Path, command: str = "") -> str:
    """Return one self-contained page: what was done, sortable tables, and the figures if matplotlib is installed.

    It leads to the parity reports that ``out`` has; without them it stands alone.
    """
    summaries, folder = table.summarize(rows), os.path.relpath(out, html.parent or ".")
    parts: list[Part] = []
    for name, columns in table.stages(summaries).items():
        cells: list[list[Cell]] = []
        for cell in summaries.cells:
            sign, report = SIGNS.get(cell.outcome, "✗"), cell.settings["report"]
            is_linked = report and (out / report).exists()
            verdict = Markup('<a href="{}/{}">{}</a>' if is_linked else "{2}").format(folder, report, cell.outcome)
            label = Markup("<bdi>{}</bdi><small>{}</small>").format(
                cell.settings["norm"], _unbroken(summaries.label(cell))
            )
            shown = [_number(cell.figures[column], summaries.columns[column]) for column in columns]
            cells.append([label, Markup("{}&nbsp;{}").format(sign, verdict), *shown])
        parts.append(
            Part(name.lower().replace(" ", "-"), name, "", ["norm", "verdict", *map(summaries.head, columns)], cells)
        )
    reasons = [(cell.settings["norm"], reason) for cell in summaries.cells for reason in cell.reasons]
    commands = [(cell.settings["norm"], line) for cell in summaries.cells for line in cell.commands]
    parts.append(Part("reasons", "What went wrong", WRONG, ("norm", "reason"), reasons))
    with contextlib.suppress(ConfigError):
        for name, svg in figures(rows).items():
            parts.append(Part(name, *CAPTIONS[name], drawing="figure", data=_inline(svg)))
    parts.append(Part("protocol", "What was done", DONE, ("", "value"), table.protocol(rows, command)))
    parts.append(Part("commands", "Run a cell again", AGAIN, ("norm", "command"), commands, folded="Commands"))
    parts = [part for part in parts if part.rows or part.drawing]
    models = listing({str(cell.settings["model"]) for cell in summaries.cells})
    return render(f"{title}: {models}", [Sheet(title, parts, subject=models, about=MEANING)], "study.html")


def _unbroken(label: str) -> Markup:
    """Return a label that breaks between its words and patterns, and inside of those only that are very long."""
    words: list[Markup] = []
    for word in _spaced(label).split():
        whole = Markup('<span class="whole">{}</span>') if len(word) <= MOST_UNBROKEN else Markup("{}")
        words.append(whole.format(word))
    return Markup(" ").join(words)


def _spaced(label: str) -> str:
    """Return a label with a space after each comma, where a line may end."""
    return ", ".join(words_of(label))


def _lines(title: str, width: int) -> str:
    """Return the title of a figure in lines of at most so many characters. A pattern's hyphen ends none."""
    return "\n".join(textwrap.wrap(_spaced(title), width, break_on_hyphens=False))


def _number(figure: table.Figure | None, column: table.Column) -> Cell:
    return None if figure is None else Number(figure.mean, lambda _: table.format_figure(figure, column))


def figures(rows: list[CellRow]) -> dict[str, str]:
    """Return SVG pictures by name: curves of the held-out loss, and each cell's most telling figure.

    Raises:
        ConfigError: if matplotlib is not installed.
    """
    summaries = table.summarize(rows)
    titles = [", ".join(filter(None, (cell.settings["norm"], summaries.label(cell)))) for cell in summaries.cells]
    drawn: dict[str, str] = {}
    if summaries.is_trained:
        drawn["loss"] = _drawn(lambda axes: _curves(axes, summaries.cells, titles), HEIGHT + 0.17 * len(titles))
    name = "over_baseline" if summaries.is_trained else "kl_mean"
    looks = zip(titles, summaries.cells, itertools.cycle(COLOURS), strict=False)
    cells = [(title, figure, colour) for title, cell, colour in looks if (figure := cell.figures[name])]
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
        raise ConfigError("figures need matplotlib, which is not installed; pip install 'minigpt[plots]'") from error
    with mpl.rc_context({
        "svg.fonttype": "none", "svg.hashsalt": "minigpt", "font.size": 9, "font.family": "DejaVu Sans",
        "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
        "grid.color": GRID, "axes.spines.top": False, "axes.spines.right": False,
    }):  # fmt: skip
        canvas = Canvas((WIDTH, height), layout="constrained")
        draw(canvas.add_subplot())
        file = io.StringIO()
        canvas.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return file.getvalue()


def _curves(axes: Any, cells: list[table.Summary], titles: list[str]) -> None:
    """Draw the loss over the steps, a band of one standard error over seeds around each mean, and ticks at swaps."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    looks = zip(itertools.cycle(COLOURS), itertools.cycle(DASHES), strict=False)
    for cell, title, (colour, dash) in zip(cells, titles, looks, strict=False):
        points = [point for point in zip(*cell.curves, strict=False) if None not in (loss for _, loss in point)]
        if not points:
            continue
        steps = [point[0][0] for point in points]
        losses = np.array([[loss for _, loss in point] for point in points])  # (steps, seeds)
        means = losses.mean(1)
        axes.plot(steps, means, color=colour, linestyle=dash, linewidth=1.5, label=_lines(title, 70))
        if losses.shape[1] > 1:
            errors = losses.std(1, ddof=1) / math.sqrt(losses.shape[1])
            axes.fill_between(steps, means - errors, means + errors, color=colour, alpha=0.25, linewidth=0)
        swaps = sorted({*cell.settings["swaps"].values()})
        axes.plot(swaps, [0.02] * len(swaps), "|", color=colour, transform=axes.get_xaxis_transform(), markersize=6)
    axes.set(xlabel="step", ylabel=f"{table.TRAINED['loss'].head}, nats a token", yscale="log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7), numticks=12))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(visible=True, linewidth=0.5)
    axes.figure.legend(loc="outside lower left", frameon=False, fontsize=8)


def _cells(axes: Any, cells: list[tuple[str, table.Figure, str]], column: table.Column) -> None:
    """Draw a figure of each cell with its standard error."""
    from matplotlib.ticker import MaxNLocator

    sizes = [abs(figure.mean) for _, figure, _ in cells]
    middle = statistics.median(sizes) or min(filter(None, sizes), default=1.0)
    if not column.is_difference and min(sizes) > 0:
        axes.set_xscale("log")
    elif max(sizes) > 30 * middle:  # else a bad cell puts all others on 0
        axes.set_xscale("symlog", linthresh=10 ** math.ceil(math.log10(middle)))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5))
    style = {"fmt": "o", "markersize": 4, "capsize": 3, "linewidth": 1.2}
    for place, (_, figure, colour) in enumerate(cells):
        axes.errorbar(figure.mean, place, xerr=figure.error or 0.0, color=colour, **style)
    if column.is_difference:
        axes.axvline(0, color=INK, linewidth=0.8)
    axes.set(yticks=range(len(cells)), xlabel=column.title, ylim=(len(cells) - 0.5, -0.5))
    axes.set_yticklabels([_lines(title, 34) for title, *_ in cells], fontsize=8)
    axes.grid(visible=True, axis="x", linewidth=0.5)


def _inline(svg: str) -> Any:
    """Return a picture as a part of a page, in the colours of its scheme."""
    body = svg[svg.index("<svg") :].replace(INK, "currentColor").replace(GRID, "var(--line)")
    return Markup(body.replace("'DejaVu Sans'", "inherit"))  # matplotlib escapes what it writes
