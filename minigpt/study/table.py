"""A study's rows on the terminal, as CSV, and as one page."""

import csv
import io
import math
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from minigpt.report.charts import LogScale
from minigpt.report.numerals import brief, percent, times
from minigpt.report.page import SIGNS, render
from minigpt.report.parity_summary import outcome
from minigpt.study.study import BASELINE, Row

Form = Callable[[float], str]
Columns = dict[str, tuple[str, Form]]  # by the column of the row: its head for people, and the form of its figures


class Spread(NamedTuple):
    """A figure of one seed or several: the mean, and its standard error."""

    mean: float
    error: float


def close(x: float) -> str:
    """Format with four significant digits."""
    return brief(x, 4)


def signed(x: float) -> str:
    """Format a difference with its sign."""
    return f"{'+' if x > 0 else '−' if x < 0 else ''}{brief(abs(x))}"  # noqa: RUF001


SWAPPED: Columns = {
    "ratio": ("times the noise floor", times),
    "kl_mean": ("KL, mean", brief),
    "kl_median": ("KL, median", brief),
    "top1_agreement": ("same likeliest token", percent),
    "perplexity_before": ("perplexity of the original", close),
    "perplexity_after": ("perplexity", close),
    "decode_norm_share": ("norms’ share of decoding", percent),  # noqa: RUF001
}
TRAINED: Columns = {
    "loss": ("held-out loss", close),
    "over_baseline": ("over the baseline", signed),
    "perplexity_recovered": ("perplexity", close),
    "kl_recovered": ("KL, mean", brief),
    "kl_median_recovered": ("KL, median", brief),
    "top1_recovered": ("same likeliest token", percent),
}
FINAL: Columns = {"entropy": ("entropy", brief), "calibration_error": ("calibration error", brief)}
TIME: Columns = {"seconds": ("seconds", close)}
ON_TERMINAL = {
    "ratio": "of noise",
    "kl_mean": "KL mean",
    "perplexity_before": "perplexity",
    "perplexity_after": "swapped",
    "perplexity_recovered": "trained",
    "over_baseline": "over baseline",
}
IDENTITY = ("model", "norm", "sites", "seed", "fit")
WIDTH, HEIGHT = 340, 190  # of the area in which curves are drawn


def summary(rows: list[Row]) -> Table:
    """Return the most important columns for the terminal. A setting that all cells share is left out."""
    rows, names = over_seeds(rows)
    figures = {name: head for name, head in ON_TERMINAL.items() if any(row[name] for row in rows)}
    table = Table(*(name.replace("_", " ") for name in names), "verdict", *figures.values(), box=None, pad_edge=False)
    for row in rows:
        values = (Text(shown(row[name], (SWAPPED | TRAINED)[name][1])) for name in figures)
        table.add_row(*(Text(said(row.get(name))) for name in names), outcome(row["outcome"]), *values)
    return table


def csv_table(rows: list[Row]) -> str:
    """Return the table as CSV: a line a cell, seeds apart, with the figures of tasks and metrics as columns."""
    rows = with_derived(rows)
    columns = dict.fromkeys((*IDENTITY, *varying(rows), "verdict", "outcome", *columns_of(rows), "command"))
    text = io.StringIO()
    writer: csv.DictWriter[str] = csv.DictWriter(text, [*columns], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def page(rows: list[Row], title: str, out: Path, html: Path) -> str:
    """Return one self-contained page: sortable tables, and the curves of the held-out loss."""
    rows, names = over_seeds(rows)
    final = {name: about for name, about in columns_of(rows).items() if name not in SWAPPED | TRAINED}
    chart = plot(rows, names)
    tables = {"At the swap": SWAPPED, "After training": TRAINED | final} if chart else {"At the swap": SWAPPED | final}
    return render(
        "study.html",
        title=title,
        rows=rows,
        tables={
            name: {column: about for column, about in columns.items() if any(row[column] for row in rows)}
            for name, columns in tables.items()
        },
        about=lambda row: _about(row, names),
        shown=shown,
        signs=SIGNS,
        plot=chart,
        reports=os.path.relpath(out, html.parent or "."),
    )


def with_derived(rows: list[Row]) -> list[Row]:
    """Return the rows with tasks and metrics as columns, the last held-out loss, and how far the baseline is below."""
    rows = [row | row["tasks"] | row.get("metrics", {}) for row in rows]
    for row in rows:
        curve = row["eval_losses"] or row["losses"]
        row["loss"] = curve[-1][1] if curve else None
    baselines = {_trained_as(row): row["loss"] for row in rows if row["norm"] == BASELINE}
    for row in rows:
        baseline = baselines.get(_trained_as(row))
        row["over_baseline"] = None if None in (row["loss"], baseline) else row["loss"] - baseline
    return rows


def _trained_as(row: Row) -> str:
    settings = {name: row.get(name) for name in row.get("settings", ()) if name not in ("schedule", "fit")}
    return str([row["model"], row["seed"], settings])


def varying(rows: list[Row]) -> list[str]:
    """Return the settings in which rows differ, the norm in any case."""
    names = dict.fromkeys(("norm", *IDENTITY, *(name for row in rows for name in row.get("settings", ()))))
    return [name for name in names if name == "norm" or len({str(row.get(name)) for row in rows}) > 1]


def columns_of(rows: list[Row]) -> Columns:
    """Return all columns of figures, with the rows' tasks and metrics."""
    more: Columns = {name: (name, brief) for row in rows for name in (*row["tasks"], *row.get("metrics", ()))}
    return SWAPPED | TRAINED | FINAL | more | TIME


def over_seeds(rows: list[Row]) -> tuple[list[Row], list[str]]:
    """Return a row for each cell, with a Spread or None for each figure of its seeds; and the names of what varies."""
    rows = with_derived(rows)
    names = [name for name in varying(rows) if name != "seed"]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(str([row.get(name) for name in names]), []).append(row)
    return [_merged(group) for group in groups.values()], names


def _merged(group: list[Row]) -> Row:
    """Return the row of one cell's seeds."""
    row = group[0] | {"seeds": len(group), "commands": [one["command"] for one in group]}
    if any(one["outcome"] != row["outcome"] for one in group):
        row["outcome"] = "FAIL"
    for name in columns_of(group):
        values = [one.get(name) for one in group]
        known = [float(value) for value in values if value is not None]
        error = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else 0.0
        row[name] = Spread(statistics.fmean(known), error) if len(known) == len(values) else None
    for name in ("losses", "eval_losses"):
        points = zip(*(one[name] for one in group), strict=False)
        row[name] = [(seeds[0][0], statistics.fmean(loss for _, loss in seeds)) for seeds in points]
    return row


def shown(value: Spread | None, form: Form) -> str:
    """Return a figure as a cell of the table shows it."""
    if value is None:
        return "–"  # noqa: RUF001
    return form(value.mean) + (f" ± {brief(value.error, 2)}" if value.error else "")


def said(value: Any) -> str:
    """Return a setting as a cell of the table shows it."""
    return "–" if value is None else str(value)  # noqa: RUF001


def _about(row: Row, names: list[str]) -> str:
    """Return the settings of a cell beside its norm, of those that vary."""
    found = [f"{name.replace('_', ' ')} {said(row.get(name))}" for name in names if name != "norm"]
    return ", ".join(found + ([f"{row['seeds']} seeds"] if row["seeds"] > 1 else []))


def plot(rows: list[Row], names: list[str]) -> dict[str, list[Any]] | None:
    """Return each row's curve of held-out loss, or of loss if there is none, and the ticks of the axes.

    The scale of the loss is logarithmic. None if no row was trained.
    """
    trained = [(row, line) for row in rows if (line := row["eval_losses"] or row["losses"])]
    if not trained:
        return None
    scale = LogScale(loss for _, line in trained for _, loss in line)
    last = max(line[-1][0] for _, line in trained) or 1

    def x(step: float) -> float:
        return round(step / last * WIDTH, 1)

    def y(loss: float) -> float:
        return round((1 - scale.place(loss)) * HEIGHT, 1)

    quarters = [part / 4 for part in range(5)]
    return {
        "curves": [
            {
                "name": f"{row['norm']}, {_about(row, names)}".removesuffix(", "),
                "points": " ".join(f"{x(step)},{y(loss)}" for step, loss in line),
                "swaps": sorted({x(step) for step in row["swaps"].values()}),
                "first": line[0],
                "last": line[-1],
            }
            for row, line in trained
        ],
        "losses": [(HEIGHT * (1 - part), brief(scale.low * (scale.high / scale.low) ** part)) for part in quarters],
        "steps": [(WIDTH * part, f"{last * part:g}") for part in quarters],
    }
