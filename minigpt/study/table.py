"""A study's rows as a table: on the terminal and as CSV, and what was done in words."""

import csv
import io
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from minigpt.judge.measures import mean_by_rows
from minigpt.progress import duration
from minigpt.report.numerals import Form, brief, percent, precise
from minigpt.report.part import Cell, Number, Part
from minigpt.study.settings import LAYER_NORM
from minigpt.study.study import DIVERGED, FAILED, CellRow

IDENTITY = ("model", "norm", "sites", "seed", "fit")
OF_A_SWAP = ("norm", "sites", "keep", "fit", "schedule")  # settings that a control does not have


@dataclass(frozen=True)
class Column:
    """A figure: its name, its unit, how it is shown, and whether it is a difference."""

    head: str
    unit: str = ""
    form: Form = brief
    is_difference: bool = False

    @property
    def title(self) -> str:
        """The name with the unit."""
        if self.unit:
            return f"{self.head}, {self.unit}"
        return self.head


Columns = dict[str, Column]  # by the name in a row

SWAPPED: Columns = {
    "ratio": Column("error over the noise floor", "×"),  # noqa: RUF001
    "kl_mean": Column("KL, mean", "nats"),
    "kl_median": Column("KL, median", "nats"),
    "top1_agreement": Column("same top token", form=percent),
    "loss_change": Column("loss over the original", "nats", is_difference=True),
    "perplexity_before": Column("perplexity of the original", form=precise),
    "perplexity_after": Column("perplexity", form=precise),
}
TRAINED: Columns = {
    "loss": Column("held-out loss", "nats", form=precise),
    "over_baseline": Column("over the control", "nats", is_difference=True),
    "perplexity_recovered": Column("perplexity", form=precise),
    "kl_recovered": Column("KL, mean", "nats"),
    "kl_median_recovered": Column("KL, median", "nats"),
    "top1_recovered": Column("same top token", form=percent),
}
FINAL: Columns = {"entropy": Column("entropy", "nats")}
TIME: Columns = {"seconds": Column("time", "s")}
ON_TERMINAL = ("ratio", "kl_mean", "perplexity_before", "perplexity_after", "perplexity_recovered", "over_baseline")


@dataclass(frozen=True)
class Summary:
    """A cell of the table: the seeds of one cell of the study.

    Attributes:
        settings: the row of its first seed.
        outcome: FAILED, DIVERGED or FAIL if one of the seeds is.
        figures: by name, with their standard errors; None where a seed lacks it.
        curves: of each seed, the losses over the steps.
    """

    settings: CellRow
    outcome: str
    reasons: list[str]
    commands: list[str]
    seeds: int
    figures: dict[str, Number | None]
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
        """Return those settings of a cell that vary, without its norm."""
        words = []
        for name in self.varying:
            if name != "norm":
                words.append(f"{in_words(name)} {format_setting(cell.settings.get(name))}")
        if cell.seeds > 1:
            words.append(f"{cell.seeds} seeds")
        return ", ".join(words)

    def head(self, name: str) -> str:
        """Return the head of a column, with what its ± is over."""
        title = self.columns[name].title
        if name in self.errors:
            return f"{title} (± {self.errors[name]})"
        return title

    def having(self, names: Iterable[str]) -> list[str]:
        """Return the ``names`` that have a figure in a cell."""
        return [name for name in names if any(cell.figures.get(name) for cell in self.cells)]

    @property
    def is_trained(self) -> bool:
        """True if a cell is trained."""
        return any(any(cell.curves) for cell in self.cells)


def summarize(rows: list[CellRow]) -> Summaries:
    """Return the seeds of each cell as one, with one standard error for each figure.

    A column has the larger of two errors: over the seeds, if there are several, or over the rows of the text.
    """
    rows = with_derived(rows)
    settings = [name for name in varying(rows) if name != "seed"]
    groups = _grouped(rows, settings)
    cells = [_summary(group) for group in groups]
    over_rows, over_seeds = _over_rows(rows), f"{max(map(len, groups), default=0)} seeds"
    columns = columns_of(rows)
    over: dict[str, str] = {}
    for name in columns:
        errors = [_mean(group, f"{name}_se") for group in groups]
        by_seed = [_seed_error(group, name) for group in groups]
        over_what = over_rows
        if _total(by_seed) > _total(errors):
            errors, over_what = by_seed, over_seeds
        if _total(errors):
            over[name] = over_what
        for cell, group, error in zip(cells, groups, errors, strict=True):
            mean = _mean(group, name)
            cell.figures[name] = None if mean is None else Number(mean, columns[name].form, error)
    return Summaries(cells, settings, columns, over)


def _grouped(rows: list[CellRow], settings: list[str]) -> list[list[CellRow]]:
    """Return the rows with equal settings together."""
    groups: dict[str, list[CellRow]] = {}
    for row in rows:
        values = [row.get(name) for name in settings]
        groups.setdefault(str(values), []).append(row)
    return list(groups.values())


def _summary(group: list[CellRow]) -> Summary:
    reasons = [row["reason"] for row in group if row.get("reason")]
    return Summary(
        settings=group[0],
        outcome=_outcome([row["outcome"] for row in group]),
        reasons=list(dict.fromkeys(reasons)),
        commands=[row["command"] for row in group],
        seeds=len(group),
        figures={},
        curves=[row["eval_losses"] or row["losses"] for row in group],
    )


def _outcome(outcomes: list[str]) -> str:
    """Return the outcome of all seeds if it is one, else the worst."""
    if len(set(outcomes)) == 1:
        return outcomes[0]
    for worst in (FAILED, DIVERGED):
        if worst in outcomes:
            return worst
    return "FAIL"


def _over_rows(rows: list[CellRow]) -> str:
    """Return what the errors over texts are over: the windows of the text, or the prompts."""
    windows = 0
    for row in rows:
        windows = max(windows, len(row.get("text_rows") or ()))
    return f"{windows} rows" if windows else "prompts"


def _total(errors: list[float | None]) -> float:
    """Return the sum of the errors that are known."""
    return sum(error or 0.0 for error in errors)


def _values(group: list[CellRow], name: str) -> list[float] | None:
    """Return a figure of every seed; None if a seed lacks it."""
    values = []
    for row in group:
        if row.get(name) is None:
            return None
        values.append(row[name])
    return values


def _mean(group: list[CellRow], name: str) -> float | None:
    """Return the mean of a figure over seeds; None if a seed lacks it."""
    values = _values(group, name)
    if values is None:
        return None
    return statistics.fmean(values)


def _seed_error(group: list[CellRow], name: str) -> float | None:
    """Return the standard error of that mean; None if a seed lacks the figure, or there is one seed."""
    values = _values(group, name)
    if values is None or len(values) < 2:
        return None
    return statistics.stdev(values) / math.sqrt(len(values))


def with_derived(rows: list[CellRow]) -> list[CellRow]:
    """Return the rows with metrics as columns, their held-out loss, and how far it is above the control's."""
    derived = []
    controls: dict[str, CellRow] = {}
    for row in rows:
        row = row | row.get("metrics", {}) | {"loss": None, "over_baseline": None}
        _derive_loss(row)
        derived.append(row)
        if is_control(row):
            controls[_trained_as(row)] = row
    for row in derived:
        control = controls.get(_trained_as(row))
        is_trained = row["losses"] or row["eval_losses"]
        if control is not None and is_trained:
            _derive_difference(row, control)
    return derived


def _derive_loss(row: CellRow) -> None:
    """Give a row its held-out loss: of the text, else the last of its training."""
    curve = row["eval_losses"] or row["losses"]
    if row.get("text_rows"):
        row["loss"], row["loss_se"] = _mean_of(row["text_rows"])
    elif curve:
        _, row["loss"] = curve[-1]


def _derive_difference(row: CellRow, control: CellRow) -> None:
    """Give a row its loss over the control's, paired by the rows of the text where both have some."""
    if row["loss"] is None or control["loss"] is None:
        return
    row["over_baseline"] = row["loss"] - control["loss"]
    if not (row.get("text_rows") and control.get("text_rows")):
        return
    differences = []
    for (tokens, loss), (_, other) in zip(row["text_rows"], control["text_rows"], strict=True):
        differences.append([tokens, loss - other])
    row["over_baseline"], row["over_baseline_se"] = _mean_of(differences)


def is_control(row: CellRow) -> bool:
    """Return whether a row is of a model's own norms."""
    return row.get("control", row["norm"] == LAYER_NORM)


def _mean_of(rows: list[list[float]]) -> tuple[float, float | None]:
    """Return the mean over tokens of sums [tokens, sum], a row each, and its standard error over the rows."""
    totals = [total for _, total in rows]
    tokens = [int(count) for count, _ in rows]
    mean, error = mean_by_rows(totals, tokens)
    if not math.isfinite(error):
        return mean, None
    return mean, error


def _trained_as(row: CellRow) -> str:
    """Return what a row has in common with its control, as a key."""
    settings = {}
    for name in row.get("settings", ()):
        if name not in OF_A_SWAP:
            settings[name] = row.get(name)
    return str([row["model"], row["seed"], settings])


def varying(rows: list[CellRow]) -> list[str]:
    """Return the settings in which rows differ, the norm in any case."""
    names = dict.fromkeys(("norm", *IDENTITY))
    for row in rows:
        names |= dict.fromkeys(row.get("settings", ()))
    varied = ["norm"]
    for name in names:
        values = {str(row.get(name)) for row in rows}
        if name != "norm" and len(values) > 1:
            varied.append(name)
    return varied


def columns_of(rows: list[CellRow]) -> Columns:
    """Return all columns of figures, with the rows' metrics."""
    metrics = {}
    for row in rows:
        for name in row.get("metrics", ()):
            metrics[name] = Column(name)
    return SWAPPED | TRAINED | FINAL | metrics | TIME


def stages(table: Summaries) -> dict[str, list[str]]:
    """Return the columns of the tables of a page, by title: the columns that have a figure."""
    final = [name for name in table.columns if name not in SWAPPED | TRAINED]
    if not table.is_trained:
        return {"At the swap": table.having([*SWAPPED, "loss", *final])}
    return {"At the swap": table.having(SWAPPED), "After training": table.having([*TRAINED, *final])}


def terminal_part(rows: list[CellRow]) -> Part:
    """Return the most important columns for the terminal. A setting that all cells share is left out."""
    table = summarize(rows)
    names = table.having(ON_TERMINAL)
    heads = [*map(in_words, table.varying), "verdict"]
    for name in names:
        heads.append(table.head(name) + " after training" * (name in TRAINED))
    lines: list[list[Cell]] = []
    for cell in table.cells:
        settings = [format_setting(cell.settings.get(name)) for name in table.varying]
        lines.append([*settings, cell.outcome, *(cell.figures[name] for name in names)])
    return Part("cells", "Cells", "\u00b1 is the standard error.", heads, lines)


def csv_table(rows: list[CellRow]) -> str:
    """Return the table as CSV: a line a cell, seeds apart. ``NAME_se`` is the standard error over rows of the text."""
    rows = with_derived(rows)
    figures = []
    for name in columns_of(rows):
        for one in (name, f"{name}_se"):
            if any(one in row for row in rows):
                figures.append(one)
    columns = dict.fromkeys((*IDENTITY, *varying(rows), "verdict", "outcome", "reason", *figures, "command"))
    text = io.StringIO()
    writer: csv.DictWriter[str] = csv.DictWriter(text, [*columns], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def protocol(rows: list[CellRow], command: str = "") -> list[tuple[str, str]]:
    """Return what was done, by name: settings that all cells share, texts, seeds, versions, time."""
    facts = _common_settings(rows)
    facts["seeds"] = ", ".join(sorted({str(row["seed"]) for row in rows}))
    for row in rows:
        facts |= _conditions_of(row.get("protocol", {}))
    facts |= _amounts(rows)
    facts["time"] = duration(sum(row["seconds"] for row in rows))
    if command:
        facts["command"] = command
    return list(facts.items())


def _common_settings(rows: list[CellRow]) -> dict[str, str]:
    """Return the settings that all rows share, without texts, which have digests, and without what is usual."""
    settings: CellRow = {}
    for row in rows:
        for name in ("model", *row.get("settings", ())):
            settings[name] = row[name]
    left_out = {*varying(rows), "seed", "text", "eval_text"}
    facts = {}
    for name, value in settings.items():
        is_usual = not value or value == "all"
        if not is_usual and name not in left_out:
            facts[in_words(name)] = str(value)
    return facts


def _conditions_of(done: CellRow) -> dict[str, str]:
    """Return what a row's protocol says: texts, training, dtype and versions."""
    versions = []
    for name, number in done.get("versions", {}).items():
        if number:
            versions.append(f"{name} {number}")
    conditions = done.get("texts", {}) | done.get("training", {})
    conditions |= {"computed in": done.get("dtype"), "versions": ", ".join(versions)}
    return {name: value for name, value in conditions.items() if value}


def _amounts(rows: list[CellRow]) -> dict[str, str]:
    """Return how many tokens were trained on, and how many of the text were scored."""
    amounts = {}
    seen = length = 0
    longest: list[list[float]] = []
    for row in rows:
        seen = max(seen, row.get("tokens_seen") or 0)
        length = max(length, row.get("tokens") or 0)
        longest = max(longest, row.get("text_rows") or [], key=len)
    if seen:
        amounts["tokens seen in training"] = f"{seen:,}; the text has {length:,}"
    if longest:
        scored = int(sum(tokens for tokens, _ in longest))
        amounts["held-out text"] = f"{scored:,} tokens scored in {len(longest)} windows that overlap by half"
    return amounts


def format_setting(value: Any) -> str:
    """Return a setting as a cell of the table shows it."""
    return "\u2013" if value is None else str(value)


def in_words(name: str) -> str:
    """Return the name of a setting as a head shows it."""
    return name.replace("_", " ")
