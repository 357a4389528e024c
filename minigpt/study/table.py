"""A study's rows on the terminal, as CSV, and as one page."""

import csv
import io
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

COLUMNS = ("model", "norm", "sites", "seed", "verdict", "outcome", "ratio", "kl_mean", "top1_agreement",
           "perplexity_before", "perplexity_after", "perplexity_recovered", "kl_recovered", "top1_recovered",
           "decode_norm_share", "seconds")  # fmt: skip
WIDTH, HEIGHT = 640, 280  # of a plot

Row = dict[str, Any]


def summary(rows: list[Row]) -> Table:
    """Return the most important columns for the terminal. A model, sites or a seed that all cells share is left out."""
    names = ["norm", *(name for name in ("model", "sites", "seed") if len({row[name] for row in rows}) > 1)]
    figures = {"verdict": "outcome", "of noise": "ratio", "KL mean": "kl_mean", "perplexity": "perplexity_before",
               "swapped": "perplexity_after", "recovered": "perplexity_recovered"}  # fmt: skip
    table = Table(*names, *figures, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(shown(row[name]) for name in (*names, *figures.values())))
    return table


def csv_table(rows: list[Row]) -> str:
    """Return the table as CSV."""
    columns, rows = with_tasks(rows)
    text = io.StringIO()
    writer: csv.DictWriter[str] = csv.DictWriter(
        text, (*columns, "command"), extrasaction="ignore", lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def with_tasks(rows: list[Row]) -> tuple[tuple[str, ...], list[Row]]:
    """Return the columns, and the rows with the scores of lm-eval's tasks as columns."""
    tasks = dict.fromkeys(name for row in rows for name in row["tasks"])
    return (*COLUMNS, *tasks), [dict.fromkeys(tasks) | row | row["tasks"] for row in rows]


def page(rows: list[Row], title: str, out: Path, html: Path) -> str:
    """Return one self-contained page: the table, sortable, and the curves of the held-out loss."""
    import jinja2

    loader = jinja2.PackageLoader("minigpt", "report/templates")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["shown"] = shown
    reports = os.path.relpath(out, html.parent or ".")
    columns, rows = with_tasks(rows)
    template = environment.get_template("study.html")
    return template.render(title=title, rows=rows, columns=columns, plot=plot(rows), reports=reports,
                           width=WIDTH, height=HEIGHT)  # fmt: skip


class Curve(NamedTuple):
    """A row's losses as points of the plot, on a logarithmic scale."""

    name: str
    hue: int
    points: str
    swaps: list[float]  # where the steps of its swaps are
    first: list[float]
    last: list[float]


class Plot(NamedTuple):
    """The curves, and what the ends of the axes stand for."""

    curves: list[Curve]
    low: float
    high: float
    steps: int


def plot(rows: list[Row]) -> Plot | None:
    """Return each row's curve of held-out loss, or of loss if there is none; None if no row was trained."""
    lines = [(row, row["eval_losses"] or row["losses"]) for row in rows]
    lines = [(row, line) for row, line in lines if line]
    if not lines:
        return None
    losses = [max(loss, 1e-9) for _, line in lines for _, loss in line]
    low, high, last = min(losses), max(losses), max(line[-1][0] for _, line in lines) or 1
    varied = [name for name in ("model", "norm", "sites", "seed") if len({row[name] for row in rows}) > 1] or ["norm"]

    def x(step: int) -> float:
        return round(step / last * WIDTH, 1)

    def y(loss: float) -> float:
        return round(math.log(high / max(loss, 1e-9)) / (math.log(high / low) or 1.0) * HEIGHT, 1)

    curves = [
        Curve(
            " ".join(str(row[name]) for name in varied),
            round(360 * place / len(lines)),
            " ".join(f"{x(step)},{y(loss)}" for step, loss in line),
            sorted({x(step) for step in row["swaps"].values()}),
            line[0],
            line[-1],
        )
        for place, (row, line) in enumerate(lines)
    ]
    return Plot(curves, low, high, last)


def shown(value: Any) -> str:
    """Return a value as a cell of the table shows it."""
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) else str(value)
