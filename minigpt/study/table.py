"""A study's rows on the terminal, as CSV, and as one page."""

import csv
import io
import math
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup
from rich.table import Table
from rich.text import Text

from minigpt.measure.numerals import brief, count, percent, times
from minigpt.report.page import SIGNS, render
from minigpt.report.parity_summary import outcome
from minigpt.study.study import BASELINE

Row = dict[str, Any]
Form = Callable[[float], str]


def close(x: float) -> str:
    """Format with four significant digits."""
    return brief(x, 4)


def signed(x: float) -> str:
    """Format a difference with its sign."""
    return f"{'+' if x > 0 else '−' if x < 0 else ''}{brief(abs(x))}"  # noqa: RUF001


# Column of the row, its head for people, and the form of its figures
SWAPPED: dict[str, tuple[str, Form]] = {
    "ratio": ("times the noise floor", times),
    "kl_mean": ("KL, mean", brief),
    "kl_median": ("KL, median", brief),
    "top1_agreement": ("same likeliest token", percent),
    "perplexity_before": ("perplexity of the original", close),
    "perplexity_after": ("perplexity", close),
    "decode_norm_share": ("norms’ share of decoding", percent),  # noqa: RUF001
}
TRAINED: dict[str, tuple[str, Form]] = {
    "loss": ("held-out loss", close),
    "over_baseline": ("over the baseline", signed),
    "perplexity_recovered": ("perplexity", close),
    "kl_recovered": ("KL, mean", brief),
    "kl_median_recovered": ("KL, median", brief),
    "top1_recovered": ("same likeliest token", percent),
}
FINAL: dict[str, tuple[str, Form]] = {"entropy": ("entropy", brief), "calibration_error": ("calibration error", brief)}
TIME: dict[str, tuple[str, Form]] = {"seconds": ("seconds", close)}
IDENTITY = ("model", "norm", "sites", "seed", "fit")


class Spread(NamedTuple):
    """A figure of several seeds: the mean, and its standard error."""

    mean: float
    error: float


def summary(rows: list[Row]) -> Table:
    """Return the most important columns for the terminal. A setting that all cells share is left out."""
    rows, names = over_seeds(rows)
    most = {"ratio": "of noise", "kl_mean": "KL mean", "perplexity_before": "perplexity", "perplexity_after": "swapped",
            "perplexity_recovered": "trained", "over_baseline": "over baseline"}  # fmt: skip
    forms = columns_of(rows, SWAPPED | TRAINED)
    figures = {name: head for name, head in most.items() if name in forms}
    table = Table(*(name.replace("_", " ") for name in names), "verdict", *figures.values(), box=None, pad_edge=False)
    for row in rows:
        values = (Text(shown(row[name], forms[name][1])) for name in figures)
        table.add_row(*(Text(said(row.get(name))) for name in names), outcome(row["outcome"]), *values)
    return table


def csv_table(rows: list[Row]) -> str:
    """Return the table as CSV: a line a cell, seeds apart, with the figures of tasks and metrics as columns."""
    rows = with_derived(rows)
    settings = [name for name in varying(rows) if name not in IDENTITY]
    figures = (*SWAPPED, *TRAINED, *FINAL, *_more(rows), *TIME)
    columns = dict.fromkeys((*IDENTITY, *settings, "verdict", "outcome", *figures, "command"))
    text = io.StringIO()
    writer: csv.DictWriter[str] = csv.DictWriter(text, [*columns], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def page(rows: list[Row], title: str, out: Path, html: Path) -> str:
    """Return one self-contained page: sortable tables, and the curves of the held-out loss."""
    rows, names = over_seeds(rows)
    final = FINAL | {name: (name, brief) for name in _more(rows)}
    trained = any(row["eval_losses"] or row["losses"] for row in rows)
    tables = [("At the swap", SWAPPED if trained else SWAPPED | final | TIME)]
    if trained:
        tables.append(("After training", TRAINED | final | TIME))
    return render(
        "study.html",
        title=title,
        rows=rows,
        tables=[(name, columns) for name, asked in tables if (columns := columns_of(rows, asked))],
        heads=_heads,
        label=lambda row: (row["norm"], ", ".join(_settings(row, names))),
        value=lambda x: x.mean if isinstance(x, Spread) else "" if x is None else x,
        shown=shown,
        signs=SIGNS,
        plot=plot(rows, names),
        reports=os.path.relpath(out, html.parent or "."),
    )


def _heads(columns: dict[str, tuple[str, Form]], has_verdict: bool) -> list[Markup]:
    names = ("norm", *(["verdict"] if has_verdict else []), *(head for head, _ in columns.values()))
    return [Markup('<button type="button">{}</button>').format(name) for name in names]


def with_derived(rows: list[Row]) -> list[Row]:
    """Return the rows with tasks and metrics as columns, the last held-out loss, and how far the baseline is below."""
    rows = [row | row["tasks"] | row.get("metrics", {}) | {"loss": _last(row)} for row in rows]
    baselines = {_trained_as(row): row["loss"] for row in rows if row["norm"] == BASELINE}
    for row in rows:
        baseline = baselines.get(_trained_as(row))
        row["over_baseline"] = None if None in (row["loss"], baseline) else row["loss"] - baseline
    return rows


def over_seeds(rows: list[Row]) -> tuple[list[Row], list[str]]:
    """Return a row for each cell, with a Spread for each figure of several seeds; and the names of what varies."""
    rows = with_derived(rows)
    names = [name for name in varying(rows) if name != "seed"]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(str([row.get(name) for name in names]), []).append(row)
    return [_merged(group) for group in groups.values()], names


def varying(rows: list[Row]) -> list[str]:
    """Return the settings in which rows differ, the norm in any case."""
    names = dict.fromkeys(("norm", *IDENTITY, *(name for row in rows for name in row.get("settings", ()))))
    return [name for name in names if name == "norm" or len({str(row.get(name)) for row in rows}) > 1]


def columns_of(rows: list[Row], asked: dict[str, tuple[str, Form]]) -> dict[str, tuple[str, Form]]:
    """Return the columns that at least one row has a figure for."""
    return {name: about for name, about in asked.items() if any(row.get(name) is not None for row in rows)}


def shown(value: float | Spread | None, form: Form) -> str:
    """Return a figure as a cell of the table shows it."""
    if isinstance(value, Spread):
        return f"{form(value.mean)} ± {brief(value.error, 2)}" if value.error else form(value.mean)
    return "–" if value is None else form(value)  # noqa: RUF001


def said(value: Any) -> str:
    """Return a setting as a cell of the table shows it."""
    return "–" if value is None else str(value)  # noqa: RUF001


def _settings(row: Row, names: Sequence[str]) -> list[str]:
    found = [_phrase(name.replace("_", " "), row.get(name)) for name in names if name != "norm"]
    return found if row["seeds"] == 1 else [*found, f"{row['seeds']} seeds"]


def _phrase(name: str, value: Any) -> str:
    if value is True or value is None or value is False:
        return name if value else f"no {name}"
    return f"{name} {value}"


def _more(rows: list[Row]) -> dict[str, None]:
    """Return the names of the rows' tasks and metrics."""
    return dict.fromkeys(name for row in rows for name in (*row["tasks"], *row.get("metrics", ())))


def _last(row: Row) -> float | None:
    line = row["eval_losses"] or row["losses"]
    return line[-1][1] if line else None


def _trained_as(row: Row) -> str:
    settings = {name: row.get(name) for name in row.get("settings", ()) if name not in ("schedule", "fit")}
    return str([row["model"], row["seed"], settings])


def _merged(group: list[Row]) -> Row:
    """Return the row of one cell's seeds."""
    first = group[0]
    row = first | {"seeds": len(group), "commands": [one["command"] for one in group]}
    if len(group) == 1:
        return row
    row["outcome"] = first["outcome"] if len({one["outcome"] for one in group}) == 1 else "FAIL"
    for name in (*SWAPPED, *TRAINED, *FINAL, *_more(group), *TIME):
        values = [one.get(name) for one in group]
        known = [float(value) for value in values if value is not None]
        error = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else 0.0
        row[name] = Spread(statistics.fmean(known), error) if len(known) == len(values) else None
    for name in ("losses", "eval_losses"):
        row[name] = [
            (points[0][0], statistics.fmean(loss for _, loss in points))
            for points in zip(*(one[name] for one in group), strict=False)
        ]
    return row


WIDTH, HEIGHT = 340, 190  # of the area in which curves are drawn


class Curve(NamedTuple):
    """A row's losses as points of the plot."""

    name: str
    hue: int
    dash: str
    points: str
    swaps: list[float]  # where the steps of its swaps are
    first: tuple[int, float]
    last: tuple[int, float]


class Plot(NamedTuple):
    """The curves, and where the ticks of the axes are."""

    curves: list[Curve]
    losses: list[tuple[float, str]]
    steps: list[tuple[float, str]]


def plot(rows: list[Row], names: Sequence[str]) -> Plot | None:
    """Return each row's curve of held-out loss, or of loss if there is none, on a logarithmic scale.

    None if no row was trained.
    """
    lines = [(row, row["eval_losses"] or row["losses"]) for row in rows]
    lines = [(row, line) for row, line in lines if line]
    if not lines:
        return None
    losses = [max(loss, 1e-9) for _, line in lines for _, loss in line]
    low, high, last = min(losses) / 1.05, max(losses) * 1.05, max(line[-1][0] for _, line in lines) or 1

    def x(step: float) -> float:
        return round(step / last * WIDTH, 1)

    def y(loss: float) -> float:
        return round(math.log(high / max(loss, 1e-9)) / math.log(high / low) * HEIGHT, 1)

    curves = [
        Curve(
            ", ".join([row["norm"], *_settings(row, names)]),
            round(360 * place / len(lines)),
            ("none", "7 3", "2 3", "9 3 2 3")[place % 4],
            " ".join(f"{x(step)},{y(loss)}" for step, loss in line),
            sorted({x(step) for step in row["swaps"].values()}),
            line[0],
            line[-1],
        )
        for place, (row, line) in enumerate(lines)
    ]
    ticks = [digit * 10.0**power for power in range(-9, 9) for digit in (1, 2, 5)]
    inside = [tick for tick in ticks if low <= tick <= high]
    if len(inside) < 2:
        inside = [low + part * (high - low) / 4 for part in range(1, 4)]
    gap = next(tick for tick in ticks if tick >= max(1, last / 6))
    return Plot(
        curves,
        [(y(tick), brief(tick, 2)) for tick in inside],
        [(x(step), count(step)) for step in range(0, last + 1, round(gap))],
    )
