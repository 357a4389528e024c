"""A study's rows as a table: on the terminal, as CSV, and in LaTeX."""

import csv
import io
import itertools
import math
import re
import statistics
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from minigpt.judge.measures import mean_by_rows
from minigpt.report.numerals import brief, percent
from minigpt.study.run import DIVERGED, FAILED, duration
from minigpt.study.study import LAYER_NORM, CellRow

IDENTITY = ("model", "norm", "sites", "seed", "fit")
OF_A_SWAP = ("norm", "sites", "keep", "fit", "schedule")  # settings that a control has no use for
WIDEST = 26  # characters of a setting in LaTeX
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


class Figure(NamedTuple):
    """A mean, and its standard errors over seeds and over rows of the text; None for one of one, or unknown."""

    mean: float
    seeds: float | None
    rows: float | None


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
    "published": Column("published", "nats", digits=5),
    "over_baseline": Column("over the control", "nats", is_difference=True),
    "perplexity_recovered": Column("perplexity", digits=4),
    "kl_recovered": Column("KL, mean", "nats"),
    "kl_median_recovered": Column("KL, median", "nats"),
    "top1_recovered": Column("same top token", "%"),
}
FINAL: Columns = {
    "entropy": Column("entropy", "nats"), "calibration_error": Column("calibration error", "%"),
}  # fmt: skip
TIME: Columns = {"seconds": Column("time", "s")}
TOO_WIDE = {"ratio", "kl_median", "kl_median_recovered", "perplexity_before", *FINAL, *TIME}
ON_TERMINAL = {"ratio": "of noise", "kl_mean": "KL mean, nats", "perplexity_before": "perplexity",
               "perplexity_after": "swapped", "perplexity_recovered": "trained",
               "over_baseline": "over control, nats", "loss": "loss, nats", "published": "published"}  # fmt: skip
LATEX = str.maketrans({c: rf"\{c}" for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "*": "{*}", "±": r"$\pm$",
    "×": r"$\times$", MINUS: "$-$", DASH: "--",  # noqa: RUF001
})  # fmt: skip


def summary(rows: list[CellRow]) -> Table:
    """Return the most important columns for the terminal. A setting that all cells share is left out."""
    merged, names = over_seeds(rows)
    is_published = any(row["published"] for row in merged)
    figures = [name for name in ON_TERMINAL if any(row[name] for row in merged) and (is_published or name != "loss")]
    heads = [*(name.replace("_", " ") for name in names), "verdict", *(ON_TERMINAL[name] for name in figures)]
    table = Table(*heads, box=None, pad_edge=False)
    for row in merged:
        settings = (Text(worded(row.get(name))) for name in names)
        table.add_row(*settings, row["outcome"], *(shown(row[name], (SWAPPED | TRAINED)[name]) for name in figures))
    return table


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


def latex_table(rows: list[CellRow], title: str) -> str:
    """Return the table of the trained cells, or of the swapped ones, for LaTeX with the package booktabs.

    It has what a page is wide enough for, and the figures of tasks and metrics; the CSV has all.
    """
    merged, names = over_seeds(rows)
    figures = {name: one for name, one in stages(merged)[-1][1].items() if name not in TOO_WIDE}
    lines: list[Sequence[str]] = [
        [*(name.replace("_", " ") for name in names), *(column.head for column in figures.values())],
        [*[""] * len(names), *(column.unit and f"({column.unit})" for column in figures.values())],
    ]
    for row in merged:
        settings = [textwrap.wrap(worded(row.get(name)), WIDEST, break_long_words=False) for name in names]
        cells = [split_errors(shown(row[name], column)) for name, column in figures.items()]
        lines += itertools.zip_longest(*settings, *cells, fillvalue="")
    head, unit, *body = (" & ".join(cell.translate(LATEX) for cell in line) + r" \\" for line in lines)
    body = [re.sub(r"(?<=[\d)])e(-?\d+)(?= &| \\\\)", r"$\\times 10^{\1}$", line) for line in body]
    facts = "; ".join(f"{name}: {value}" for name, value in protocol(rows, merged))
    return "\n".join([
        r"\begin{table}", r"\centering\small",
        rf"\caption{{{title.translate(LATEX)}. {meaning(merged).translate(LATEX)}}}",
        rf"\begin{{tabular}}{{{'l' * len(names)}{'r' * len(figures)}}}", r"\toprule", head, unit, r"\midrule", *body,
        r"\bottomrule", r"\end{tabular}", f"% {facts}", r"\end{table}", "",
    ])  # fmt: skip


def meaning(merged: list[CellRow]) -> str:
    """Return what stands behind the ± of ``shown``."""
    seeds, rows = (max((row[name] or 0 for row in merged), default=0) for name in ("seeds", "text_rows_count"))
    errors = [f"over {seeds} seeds"] * (seeds > 1) + [f"over {rows} rows of the text"] * (rows > 1)
    differences = "Differences are paired: seed with seed, row with row."
    shared = " A figure that all seeds share has the second only." * (len(errors) > 1)
    return f"± is the standard error {', then '.join(errors)}.{shared} {differences}" if errors else differences


def stages(merged: list[CellRow]) -> list[tuple[str, Columns]]:
    """Return the tables of a page: what the columns show, and those that have a figure."""
    final = {name: one for name, one in columns_of(merged).items() if name not in SWAPPED | TRAINED}
    is_trained = any(row["losses"] or row["eval_losses"] for row in merged)
    tables = [("At the swap", SWAPPED), ("After training", TRAINED | final)] if is_trained else [
        ("At the swap", SWAPPED | {name: TRAINED[name] for name in ("loss", "published")} | final)
    ]  # fmt: skip
    return [
        (title, {name: one for name, one in columns.items() if any(row[name] for row in merged)})
        for title, columns in tables
    ]


def protocol(rows: list[CellRow], merged: list[CellRow], command: str = "") -> list[tuple[str, str]]:
    """Return what was done, by name: settings that all cells share, texts, seeds, versions, hours."""
    varied, facts = {*varying(rows), "seed", "text", "eval_text"}, dict[str, str]()
    for name in dict.fromkeys(name for row in rows for name in ("model", *row.get("settings", ()))):
        value = next((row[name] for row in rows if row.get(name) is not None), None)
        if name not in varied and value not in (None, False, {}, 0):
            facts[name.replace("_", " ")] = worded(value)
    if any("steps" in row for row in rows):
        facts.setdefault("block size", "the context")
    facts["seeds"] = ", ".join(sorted({str(row["seed"]) for row in rows}))
    counts = {"text": next((sum(n for n, _ in row["text_rows"]) + 1 for row in rows if row.get("text_rows")), 0),
              "training text": next((row["tokens"] for row in rows if row.get("tokens")), 0)}  # fmt: skip
    for row in rows:
        done = row.get("protocol", {})
        for name, text in done.get("texts", {}).items():
            facts[name] = text + (f", {counts[name]:,} tokens" if counts.get(name) else "")
        facts["commit"] = done.get("commit") or facts.get("commit", "")
        if versions := ", ".join(f"{name} {one}" for name, one in done.get("versions", {}).items() if one):
            facts["versions"] = versions
    if longest := max((row["text_rows_count"] or 0 for row in merged), default=0):
        facts["rows of the text"] = f"{longest}, as long as the context; each after the first counts its second half"
    facts["time"] = duration(sum(row["seconds"] for row in rows))
    return [(name, value) for name, value in (facts | {"command": command}).items() if value]


def with_derived(rows: list[CellRow]) -> list[CellRow]:
    """Return the rows with tasks and metrics as columns, their held-out loss, and how far it is above the control's."""
    rows = [row | row.get("tasks", {}) | row.get("metrics", {}) for row in rows]
    for row in rows:
        curve = row["eval_losses"] or row["losses"]
        row["loss"] = curve[-1][1] if curve else None
        if row["eval_losses"] and row["perplexity_recovered"]:  # in whole windows, as text_rows
            row["loss"] = math.log(row["perplexity_recovered"])
        if row.get("text_rows"):
            row["loss"], row["loss_se"] = _mean_of(row["text_rows"])
    controls = {_trained_as(row): row for row in rows if row.get("control", row["norm"] == LAYER_NORM)}
    for row in rows:
        control = controls.get(_trained_as(row))
        row["over_baseline"] = None
        is_trained = row["losses"] or row["eval_losses"]
        if control is None or not is_trained or None in (row["loss"], control["loss"]):
            continue
        row["over_baseline"] = row["loss"] - control["loss"]
        if row.get("text_rows") and control.get("text_rows"):
            pairs = zip(row["text_rows"], control["text_rows"], strict=True)
            row["over_baseline"], row["over_baseline_se"] = _mean_of(
                [[n, one - other] for (n, one), (_, other) in pairs]
            )
    return rows


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
    """Return all columns of figures, with the rows' tasks and metrics."""
    more = {name: Column(name) for row in rows for name in (*row.get("tasks", ()), *row.get("metrics", ()))}
    return SWAPPED | TRAINED | FINAL | more | TIME


def over_seeds(rows: list[CellRow]) -> tuple[list[CellRow], list[str]]:
    """Return a row for each cell, with a Figure or None for each figure of its seeds; and the names of what varies."""
    rows = with_derived(rows)
    names = [name for name in varying(rows) if name != "seed"]
    groups: dict[str, list[CellRow]] = {}
    for row in rows:
        groups.setdefault(str([row.get(name) for name in names]), []).append(row)
    return [_merged(group, columns_of(rows)) for group in groups.values()], names


def _merged(group: list[CellRow], columns: Columns) -> CellRow:
    """Return the row of one cell's seeds."""
    row = group[0] | {"seeds": len(group), "commands": [one["command"] for one in group]}
    row["reasons"] = list(dict.fromkeys(one["reason"] for one in group if one.get("reason")))
    row["text_rows_count"] = len(row.get("text_rows") or ()) or None
    outcomes = {one["outcome"] for one in group}
    if len(outcomes) > 1:
        row["outcome"] = next((one for one in (FAILED, DIVERGED) if one in outcomes), "FAIL")
    for name in columns:
        values = [one[name] for one in group if one.get(name) is not None]
        errors = [one[f"{name}_se"] for one in group if one.get(f"{name}_se") is not None]
        row[name] = None if len(values) < len(group) else Figure(
            statistics.fmean(values),
            statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None,
            statistics.fmean(errors) if len(errors) == len(group) else None,
        )  # fmt: skip
    row["curves"] = [one["eval_losses"] or one["losses"] for one in group]
    return row


def shown(figure: Figure | None, column: Column) -> str:
    """Return a figure in the unit of its column, in the digits that its error leaves: 0.2869 ± 0.0006 ± 0.0031."""
    if figure is None:
        return DASH
    scale = 100 if column.unit == "%" else 1
    x, *errors = (scale * value for value in figure if value is not None)
    errors, largest = [error for error in errors if error], max(map(abs, (x, *errors)))
    sign = "" if x == 0 else MINUS if x < 0 else "+" if column.is_difference else ""
    if not errors:
        return percent(figure.mean).removesuffix("%") if column.unit == "%" else sign + brief(abs(x), column.digits)
    exponent = math.floor(math.log10(largest)) if largest and not 1e-3 <= largest < 1e6 else 0
    numbers = [number / 10.0**exponent for number in (abs(x), *errors)]
    decimals = [max(0, 1 - math.floor(math.log10(error))) for error in numbers[1:]]  # two digits of each error
    text = " ± ".join(f"{one:,.{digits}f}" for one, digits in zip(numbers, (decimals[0], *decimals), strict=True))
    return f"({sign}{text})e{exponent}" if exponent else sign + text


def split_errors(text: str) -> list[str]:
    """Return what ``shown`` shows as lines: the mean and each error. It is one line if they share an exponent."""
    mean, *errors = [text] if text.startswith("(") else text.split(" ± ")
    return [mean, *(f"± {error}" for error in errors)]


def worded(value: Any) -> str:
    """Return a setting as a cell of the table shows it."""
    return DASH if value is None else str(value)


def about(row: CellRow, names: list[str]) -> str:
    """Return the settings of a cell beside its norm, of those that vary."""
    settings = [f"{name.replace('_', ' ')} {worded(row.get(name))}" for name in names if name != "norm"]
    return ", ".join(settings + ([f"{row['seeds']} seeds"] if row["seeds"] > 1 else []))
