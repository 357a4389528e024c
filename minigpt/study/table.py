"""A study's rows as a table: on the terminal and as CSV, and what was done in words."""

import csv
import io
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from minigpt.judge.measures import mean_by_rows
from minigpt.report.numerals import brief, duration, percent
from minigpt.study.study import DIVERGED, FAILED, LAYER_NORM, CellRow

IDENTITY = ("model", "norm", "sites", "seed", "fit")
OF_A_SWAP = ("norm", "sites", "keep", "fit", "schedule")  # settings that a control does not have
MINUS, DASH = "\u2212", "\u2013"


class Column(NamedTuple):
    """A figure: its name, its unit, whether it is a difference, and how many digits it has if its error is unknown."""

    head: str
    unit: str = ""
    is_difference: bool = False
    digits: int = 3

    @property
    def title(self) -> str:
        """The name with the unit."""
        return f"{self.head}, {self.unit}" if self.unit else self.head


Columns = dict[str, Column]  # by the name in a row

SWAPPED: Columns = {
    "ratio": Column("error over the noise floor", "×"),  # noqa: RUF001
    "kl_mean": Column("KL, mean", "nats"),
    "kl_median": Column("KL, median", "nats"),
    "top1_agreement": Column("same top token", "%"),
    "loss_change": Column("loss over the original", "nats", is_difference=True),
    "perplexity_before": Column("perplexity of the original", digits=4),
    "perplexity_after": Column("perplexity", digits=4),
}
TRAINED: Columns = {
    "loss": Column("held-out loss", "nats", digits=4),
    "over_baseline": Column("over the control", "nats", is_difference=True),
    "perplexity_recovered": Column("perplexity", digits=4),
    "kl_recovered": Column("KL, mean", "nats"),
    "kl_median_recovered": Column("KL, median", "nats"),
    "top1_recovered": Column("same top token", "%"),
}
FINAL: Columns = {"entropy": Column("entropy", "nats")}
TIME: Columns = {"seconds": Column("time", "s")}
ON_TERMINAL = {
    "ratio": "of noise", "kl_mean": "KL mean, nats", "perplexity_before": "original's perplexity",
    "perplexity_after": "swapped", "perplexity_recovered": "trained", "over_baseline": "over control, nats",
}  # fmt: skip


class Figure(NamedTuple):
    """A mean, and its standard error; None if it is unknown."""

    mean: float
    error: float | None


@dataclass(frozen=True)
class Summary:
    """A cell of the table: the seeds of one cell of the study.

    Attributes:
        settings: the row of its first seed.
        outcome: FAILED, DIVERGED or FAIL if one of the seeds is.
        figures: by name; None where a seed lacks it.
        curves: of each seed, the losses over the steps.
    """

    settings: CellRow
    outcome: str
    reasons: list[str]
    commands: list[str]
    seeds: int
    figures: dict[str, Figure | None]
    curves: list[list[list[float]]]


@dataclass(frozen=True)
class Summaries:
    """The table of a study.

    Attributes:
        varying: the settings in which cells differ, the norm in any case.
        errors: what the ± of a column is over: "3 seeds", "79 rows" of the text, or "prompts".
    """

    cells: list[Summary]
    varying: list[str]
    columns: Columns
    errors: dict[str, str]

    def label(self, cell: Summary) -> str:
        """Return the settings of a cell beside its norm, of those that vary."""
        names = [name for name in self.varying if name != "norm"]
        settings = [f"{name.replace('_', ' ')} {format_setting(cell.settings.get(name))}" for name in names]
        return ", ".join(settings + ([f"{cell.seeds} seeds"] if cell.seeds > 1 else []))

    def head(self, name: str) -> str:
        """Return the head of a column, with what its ± is over."""
        return self.columns[name].title + (f" (± {self.errors[name]})" if name in self.errors else "")

    def having(self, names: Iterable[str]) -> list[str]:
        """Return those of ``names`` that have a figure in a cell."""
        return [name for name in names if any(cell.figures.get(name) for cell in self.cells)]

    @property
    def is_trained(self) -> bool:
        """True if a cell is trained."""
        return any(map(any, (cell.curves for cell in self.cells)))


def summarize(rows: list[CellRow]) -> Summaries:
    """Return the seeds of each cell as one, with one standard error for each figure.

    A column has the larger of two errors: over the seeds, if there are several, or over the rows of the text.
    """
    rows = with_derived(rows)
    names = [name for name in varying(rows) if name != "seed"]
    groups: dict[str, list[CellRow]] = {}
    for row in rows:
        groups.setdefault(str([row.get(name) for name in names]), []).append(row)
    cells = [_summary(group) for group in groups.values()]
    columns, errors = columns_of(rows), dict[str, str]()
    texts = max((len(row.get("text_rows") or ()) for row in rows), default=0)
    over_rows = f"{texts} rows" if texts else "prompts"
    over_seeds = f"{max((cell.seeds for cell in cells), default=0)} seeds"
    for name in columns:
        by_row = [_mean(group, f"{name}_se") for group in groups.values()]
        by_seed = [_seed_error(group, name) for group in groups.values()]
        totals = [sum(error or 0 for error in kind) for kind in (by_row, by_seed)]
        larger, over = (by_seed, over_seeds) if totals[1] > totals[0] else (by_row, over_rows)
        errors |= {name: over} if any(totals) else {}
        for cell, group, error in zip(cells, groups.values(), larger, strict=True):
            mean = _mean(group, name)
            cell.figures[name] = None if mean is None else Figure(mean, error)
    return Summaries(cells, names, columns, errors)


def _summary(group: list[CellRow]) -> Summary:
    outcomes = {row["outcome"] for row in group}
    worst = next((outcome for outcome in (FAILED, DIVERGED) if outcome in outcomes), "FAIL")
    outcome = outcomes.pop() if len(outcomes) == 1 else worst
    reasons = list(dict.fromkeys(row["reason"] for row in group if row.get("reason")))
    commands, curves = [row["command"] for row in group], [row["eval_losses"] or row["losses"] for row in group]
    return Summary(group[0], outcome, reasons, commands, len(group), {}, curves)


def _mean(group: list[CellRow], name: str) -> float | None:
    """Return the mean of a figure over seeds; None if a seed lacks it."""
    values = [row[name] for row in group if row.get(name) is not None]
    return statistics.fmean(values) if len(values) == len(group) else None


def _seed_error(group: list[CellRow], name: str) -> float | None:
    values = [row[name] for row in group if row.get(name) is not None]
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) == len(group) > 1 else None


def with_derived(rows: list[CellRow]) -> list[CellRow]:
    """Return the rows with metrics as columns, their held-out loss, and how far it is above the control's."""
    rows = [row | row.get("metrics", {}) | {"loss": None, "over_baseline": None} for row in rows]
    for row in rows:
        if row.get("text_rows"):
            row["loss"], row["loss_se"] = _mean_of(row["text_rows"])
        elif curve := row["eval_losses"] or row["losses"]:
            row["loss"] = curve[-1][1]
    controls = {_trained_as(row): row for row in rows if is_control(row)}
    for row in rows:
        control = controls.get(_trained_as(row))
        is_trained = row["losses"] or row["eval_losses"]
        if control is None or not is_trained or None in (row["loss"], control["loss"]):
            continue
        row["over_baseline"] = row["loss"] - control["loss"]
        if row.get("text_rows") and control.get("text_rows"):
            pairs = zip(row["text_rows"], control["text_rows"], strict=True)
            differences = [[tokens, loss - other] for (tokens, loss), (_, other) in pairs]
            row["over_baseline"], row["over_baseline_se"] = _mean_of(differences)
    return rows


def is_control(row: CellRow) -> bool:
    """Return whether a row is of a model's own norms."""
    return row.get("control", row["norm"] == LAYER_NORM)


def _mean_of(rows: list[list[float]]) -> tuple[float, float | None]:
    """Return the mean over tokens of sums [tokens, sum], a row each, and its standard error over the rows."""
    mean, error = mean_by_rows([total for _, total in rows], [int(tokens) for tokens, _ in rows])
    return mean, error if math.isfinite(error) else None


def _trained_as(row: CellRow) -> str:
    settings = {name: row.get(name) for name in row.get("settings", ()) if name not in OF_A_SWAP}
    return str([row["model"], row["seed"], settings])


def varying(rows: list[CellRow]) -> list[str]:
    """Return the settings in which rows differ, the norm in any case."""
    names = dict.fromkeys(("norm", *IDENTITY, *(name for row in rows for name in row.get("settings", ()))))
    return [name for name in names if name == "norm" or len({str(row.get(name)) for row in rows}) > 1]


def columns_of(rows: list[CellRow]) -> Columns:
    """Return all columns of figures, with the rows' metrics."""
    return SWAPPED | TRAINED | FINAL | {name: Column(name) for row in rows for name in row.get("metrics", ())} | TIME


def stages(table: Summaries) -> dict[str, list[str]]:
    """Return the columns of the tables of a page, by title: those that have a figure."""
    final = [name for name in table.columns if name not in SWAPPED | TRAINED]
    if not table.is_trained:
        return {"At the swap": table.having([*SWAPPED, "loss", *final])}
    return {"At the swap": table.having(SWAPPED), "After training": table.having([*TRAINED, *final])}


def terminal_table(rows: list[CellRow]) -> Table:
    """Return the most important columns for the terminal. A setting that all cells share is left out."""
    table = summarize(rows)
    figures = table.having(ON_TERMINAL)
    heads = [name.replace("_", " ") for name in table.varying]
    shown = Table(*heads, "verdict", *(ON_TERMINAL[name] for name in figures), box=None, pad_edge=False)
    for cell in table.cells:
        settings = [Text(format_setting(cell.settings.get(name))) for name in table.varying]
        numbers = [format_figure(cell.figures[name], table.columns[name]) for name in figures]
        shown.add_row(*settings, cell.outcome, *numbers)
    over = dict.fromkeys(table.errors[name] for name in figures if name in table.errors)
    shown.caption = f"± is the standard error over {' or '.join(over)}" if over else None
    return shown


def csv_table(rows: list[CellRow]) -> str:
    """Return the table as CSV: a line a cell, seeds apart. ``NAME_se`` is the standard error over rows of the text."""
    rows = with_derived(rows)
    figures = [one for name in columns_of(rows) for one in (name, f"{name}_se") if any(one in row for row in rows)]
    columns = dict.fromkeys((*IDENTITY, *varying(rows), "verdict", "outcome", "reason", *figures, "command"))
    text = io.StringIO()
    writer: csv.DictWriter[str] = csv.DictWriter(text, [*columns], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def protocol(rows: list[CellRow], command: str = "") -> list[tuple[str, str]]:
    """Return what was done, by name: settings that all cells share, texts, seeds, versions, time."""
    settings = {name: row[name] for row in rows for name in ("model", *row.get("settings", ()))}
    varied = {*varying(rows), "seed", "text", "eval_text"}
    facts = {
        name.replace("_", " "): str(value)
        for name, value in settings.items() if value and value != "all" and name not in varied
    } | {"seeds": ", ".join(sorted({str(row["seed"]) for row in rows}))}  # fmt: skip
    for done in (row.get("protocol", {}) for row in rows):
        versions = ", ".join(f"{name} {number}" for name, number in done.get("versions", {}).items() if number)
        parts = done.get("texts", {}) | done.get("training", {})
        parts |= {"computed in": done.get("dtype"), "versions": versions}
        facts |= {name: value for name, value in parts.items() if value}
    if seen := max((row.get("tokens_seen") or 0 for row in rows), default=0):
        length = max(row.get("tokens") or 0 for row in rows)
        facts["tokens seen in training"] = f"{seen:,}; the text has {length:,}"
    if longest := max((row.get("text_rows") or () for row in rows), key=len, default=()):
        scored = int(sum(tokens for tokens, _ in longest))
        facts["held-out text"] = f"{scored:,} tokens scored in {len(longest)} windows that overlap by half"
    facts["time"] = duration(sum(row["seconds"] for row in rows))
    return [*facts.items(), *([("command", command)] if command else [])]


def format_figure(figure: Figure | None, column: Column) -> str:
    """Return a figure in the unit of its column, in the digits that its error leaves: 0.2869 ± 0.0031."""
    if figure is None:
        return DASH
    scale = 100 if column.unit == "%" else 1
    x, error = scale * figure.mean, scale * (figure.error or 0)
    sign = "" if x == 0 else MINUS if x < 0 else "+" if column.is_difference else ""
    if not error:
        return percent(figure.mean).removesuffix("%") if column.unit == "%" else sign + brief(abs(x), column.digits)
    largest = max(abs(x), error)
    exponent = 0 if 1e-3 <= largest < 1e6 else math.floor(math.log10(largest))
    x, error = abs(x) / 10.0**exponent, error / 10.0**exponent
    digits = max(0, 1 - math.floor(math.log10(error)))  # two of the error
    text = f"{sign}{x:,.{digits}f} ± {error:,.{digits}f}"
    return f"({text})e{exponent}" if exponent else text


def format_setting(value: Any) -> str:
    """Return a setting as a cell of the table shows it."""
    return DASH if value is None else str(value)
