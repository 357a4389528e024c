"""A study's rows as a table: on the terminal, as CSV, and in LaTeX."""

import csv
import io
import itertools
import math
import re
import statistics
import textwrap
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from minigpt.judge.measures import mean_by_rows
from minigpt.report.numerals import brief, percent
from minigpt.study.run import BINS, DIVERGED, FAILED, duration
from minigpt.study.study import LAYER_NORM, CellRow

IDENTITY = ("model", "norm", "sites", "seed", "fit")
OF_A_SWAP = ("norm", "sites", "keep", "fit", "schedule")  # settings that a control has no use for
ROOM, GAP = 72, 2.4  # of a table in LaTeX and between its columns, in digits of 5 pt
NARROWEST, WIDEST = 10, 26  # characters of a setting in LaTeX
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
IN_A_PAPER = {"loss", "published", "over_baseline", "perplexity_recovered", "kl_recovered",
              "kl_mean", "top1_agreement", "perplexity_after"}  # fmt: skip
HOW = "batch size, block size, learning rate, learning rate schedule, optimizer, train, lora, residual loss, distill"
ON_TERMINAL = {"ratio": "of noise", "kl_mean": "KL mean, nats", "perplexity_before": "perplexity",
               "perplexity_after": "swapped", "perplexity_recovered": "trained",
               "over_baseline": "over control, nats", "loss": "loss, nats", "published": "published"}  # fmt: skip
LATEX = str.maketrans({c: rf"\{c}" for c in "&%$#_{}"} | {c: f"${c}$" for c in "<>|"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "*": "{*}", "±": r"$\pm$",
    "‖": r"$\|$", "×": r"$\times$", MINUS: "$-$", DASH: "--",  # noqa: RUF001
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


def latex_table(rows: list[CellRow], name: str) -> str:
    """Return the table of the trained cells, or of the swapped ones, for LaTeX with the package booktabs.

    It has the columns that fit into 360 pt, and one error of each figure; the CSV has all. Its label is tab:NAME.
    """
    merged, names = over_seeds(rows)
    in_a_paper = IN_A_PAPER | (columns_of(rows).keys() - columns_of([]).keys())  # with tasks and metrics
    figures = {one: column for one, column in stages(merged)[-1][1].items() if one in in_a_paper}
    short = {row["norm"]: re.sub(r"^.*:(?=[A-Za-z_]\w*$)", "", row["norm"]) for row in merged}
    second = {one: {"rows": "seeds", "seeds": "rows"}[first_error(merged, one)] for one in figures}
    for row in merged:
        row |= {one: row[one] and row[one]._replace(**{error: None}) for one, error in second.items()}
        row["norm"] = short[row["norm"]] if len({*short.values()}) == len(short) else row["norm"]
    width = WIDEST
    while _width(table := _lines(merged, names, figures, width)) > ROOM and (width > NARROWEST or len(figures) > 1):
        width -= 1
        if width < NARROWEST:
            figures.popitem()
            width = WIDEST
    head, *body = ("\n".join(" & ".join(map(_tex, line)) + r" \\" for line in lines) for lines in table)
    facts = "; ".join(f"{fact}: {value}" for fact, value in protocol(rows, merged))
    return "\n".join([
        r"\begin{table}", r"\centering\small", rf"\caption{{{caption(rows, merged, figures).translate(LATEX)}}}",
        rf"\label{{tab:{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}}}", r"\smallskip",
        rf"\begin{{tabular}}{{@{{}}{'l' * len(names)}{'r' * len(figures)}@{{}}}}", r"\toprule", head, r"\midrule",
        "\n\\addlinespace[2pt]\n".join(body), r"\bottomrule", r"\end{tabular}", f"% {facts}", r"\end{table}", "",
    ])  # fmt: skip


def _lines(merged: list[CellRow], names: list[str], figures: Columns, width: int) -> list[list[tuple[str, ...]]]:
    """Return the lines of cells of a table's head, and of each row, with settings wrapped at so many characters."""

    def wrapped(text: str, width: int) -> list[str]:
        return textwrap.wrap(re.sub(r",(?=\S)", ", ", text), width, break_long_words=False)

    heads = [f"{one.head} ({one.unit})" if one.unit else one.head for one in figures.values()]
    head = [wrapped(text, 11)[::-1] for text in (*(name.replace("_", " ") for name in names), *heads)]
    rows = [
        [*(wrapped(worded(row.get(name)), width) for name in names),
         *(split_errors(shown(row[name], column)) for name, column in figures.items())]
        for row in merged
    ]  # fmt: skip
    table = [list(itertools.zip_longest(*cells, fillvalue="")) for cells in (head, *rows)]
    return [table[0][::-1], *table[1:]]  # heads stand at the bottom


def _width(table: list[list[tuple[str, ...]]]) -> float:
    return sum(max(map(len, column)) + GAP for column in zip(*itertools.chain(*table), strict=True)) - GAP


def _tex(cell: str) -> str:
    return re.sub(r"(?<=[\d)])e(-?)0*(\d+)$", r"$\\cdot10^{\1\2}$", cell.replace("± ", "±").translate(LATEX))


def caption(rows: list[CellRow], merged: list[CellRow], figures: Columns) -> str:
    """Return what a reader of a paper must know of a table that has these figures."""
    facts = {name: re.sub(r", SHA-256 \w+", "", fact) for name, fact in protocol(rows, merged)}
    what = f"Norms in GPT-2 ({', '.join(dict.fromkeys(row['model'] for row in merged))})"
    if "sites" in facts:
        what += " at every site" if facts["sites"] == "*" else f" at {facts['sites']}"
    if "fit" in facts and "fit" not in varying(rows):
        what += f", fitted on {facts['fit']}"
    if is_trained(merged):
        what += f", after {facts['steps']} steps of training" if "steps" in facts else ", after training"
        what += f" on {facts['training text']}" if "training text" in facts else ""
        says = [f"{what}.", *(f"{name.capitalize()} {facts[name]}." for name in HOW.split(", ") if name in facts)]
    else:
        says = [f"{what}, swapped without training."]
    if "text" in facts:
        length = f", in {facts['rows of the text'].partition(',')[0]} rows" if "rows of the text" in facts else ""
        says.append(f"Held-out text: {facts['text']}{length}.")
    if {"kl_mean", "kl_recovered"} & figures.keys():
        says.append("KL is KL(original ‖ model), in nats a token.")
    if "fit" in varying(rows):
        says.append("A norm is fitted on the text under fit when it is swapped in.")
    if "over_baseline" in figures:
        controls = ", ".join(dict.fromkeys(row["norm"] for row in merged if is_control(row)))
        says.append(f"The control, {controls}, is the model's own norms after the same training.")
    if is_trained(merged):
        says.append(f"{'Means of the seeds' if len({row['seed'] for row in rows}) > 1 else 'Seed'} {facts['seeds']}.")
    rest = f"The CSV of the study has more figures{', as those at the swap' if is_trained(merged) else ''}."
    return " ".join(filter(None, [*says, meaning(merged, [("", figures)]), rest]))


def meaning(merged: list[CellRow], tables: list[tuple[str, Columns]]) -> str:
    """Return what stands behind the ± of ``shown``, and in which columns of the tables."""
    seeds, rows = (max((row[name] or 0 for row in merged), default=0) for name in ("seeds", "text_rows_count"))
    over = {"seeds": f"over {seeds} seeds", "rows": f"over {rows} rows of the text" if rows else "over the prompts"}
    columns: dict[str, list[str]] = {}
    averaged, differences, is_mixed = list[str](), set[str](), False
    for place, (title, figures) in enumerate(tables):
        for name, column in figures.items():
            head = column.head.replace(",", "") + f" {title.lower()}" * (place + 1 < len(tables))
            errors = [error for error in over if has_error(merged, name, error)]
            if errors:
                columns.setdefault(", then ".join(over[error] for error in errors), []).append(head)
            if len(errors) > 1:
                is_mixed |= any(row[name] and row[name].rows and not row[name].seeds for row in merged)
                averaged += [head] * all(name not in row["sums"] for row in merged)
            if column.is_difference:
                differences |= {*errors} - ({"seeds"} if name != "over_baseline" else set())
    says = [kind + f" in {', '.join(heads)}" * (len(columns) > 1) for kind, heads in columns.items()]
    text = [f"± is the standard error {'; '.join(says)}."] if says else []
    if is_mixed:
        text.append("A figure of the former that all seeds share has the second only.")
    if averaged:
        text.append(f"The second of {', '.join(averaged)} is the mean of the seeds' errors, an upper bound.")
    pairs = {"seeds": "seed with seed", "rows": "row with row" if rows else "prompt with prompt"}
    pairs = [pair for error, pair in pairs.items() if error in differences]
    return " ".join([*text, *([f"Differences are paired: {', '.join(pairs)}."] if pairs else [])])


def has_error(merged: list[CellRow], name: str, error: str) -> bool:
    """Return whether a figure of this name has such an error, "seeds" or "rows", other than 0."""
    return any(row[name] and getattr(row[name], error) for row in merged)


def first_error(merged: list[CellRow], name: str) -> str:
    """Return which error the figures of this name have first: "seeds", or "rows" if all seeds share them."""
    return "seeds" if has_error(merged, name, "seeds") else "rows"


def is_trained(merged: list[CellRow]) -> bool:
    """Return whether a cell of a study is trained."""
    return any(row["losses"] or row["eval_losses"] for row in merged)


def stages(merged: list[CellRow]) -> list[tuple[str, Columns]]:
    """Return the tables of a page: what the columns show, and those that have a figure."""
    final = {name: one for name, one in columns_of(merged).items() if name not in SWAPPED | TRAINED}
    tables = [("At the swap", SWAPPED), ("After training", TRAINED | final)] if is_trained(merged) else [
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
        if name not in varied and value not in (None, False, {}, 0, "all"):
            facts[name.replace("_", " ")] = worded(value)
    context = max((int(row["text_rows"][0][0]) + 1 for row in rows if len(row.get("text_rows") or ()) > 1), default=0)
    if any("steps" in row for row in rows) and "block_size" not in varied:
        facts.setdefault("block size", f"{context} (the context)" if context else "the context")
    facts["seeds"] = ", ".join(sorted({str(row["seed"]) for row in rows}))
    if is_trained(merged):
        facts["seeds"] += f" (order of the training text, dropout{', adapters' if 'lora' in facts else ''})"
    texts: dict[str, dict[str, int]] = {}
    for row in rows:
        done = row.get("protocol", {})
        counts = {"text": sum(n for n, _ in row.get("text_rows") or [(-1, 0)]) + 1, "training text": row.get("tokens")}
        for name, text in done.get("texts", {}).items():
            of_name = texts.setdefault(name, {})
            of_name[text] = max(of_name.get(text, 0), counts.get(name) or 0)
        facts |= done.get("training", {})
        facts["commit"] = done.get("commit") or facts.get("commit", "")
        facts["computed in"] = done.get("dtype") or facts.get("computed in", "")
        if versions := ", ".join(f"{name} {one}" for name, one in done.get("versions", {}).items() if one):
            facts["versions"] = versions
    for name, tokens in texts.items():
        facts[name] = "; ".join(text + (f", {count:,} tokens" if count else "") for text, count in tokens.items())
    if longest := max((row["text_rows_count"] or 0 for row in merged), default=0):
        facts["rows of the text"] = f"{longest}, as long as the context; each after the first counts its second half"
        prompts = next((row["protocol"]["prompts"] for row in rows if "prompts" in row.get("protocol", {})), 0)
        facts["error over the noise floor"] = f"of the {prompts or 'built-in'} prompts; other figures are of the text"
        facts["calibration error"] = f"{BINS} bins of equal width"
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
        row["sums"] = {}
        if row.get("text_rows"):
            row["loss"], row["loss_se"] = _mean_of(row["text_rows"])
            perplexity = "perplexity_recovered" if curve else "perplexity_after"
            slope = row[perplexity] or 0.0  # of the perplexity over the loss
            row["sums"] = {"loss": row["text_rows"], perplexity: [[n, slope * loss] for n, loss in row["text_rows"]]}
    controls = {_trained_as(row): row for row in rows if is_control(row)}
    for row in rows:
        control = controls.get(_trained_as(row))
        row["over_baseline"] = None
        is_trained = row["losses"] or row["eval_losses"]
        if control is None or not is_trained or None in (row["loss"], control["loss"]):
            continue
        row["over_baseline"] = row["loss"] - control["loss"]
        if row.get("text_rows") and control.get("text_rows"):
            pairs = zip(row["text_rows"], control["text_rows"], strict=True)
            row["sums"]["over_baseline"] = [[n, one - other] for (n, one), (_, other) in pairs]
            row["over_baseline"], row["over_baseline_se"] = _mean_of(row["sums"]["over_baseline"])
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
    row["sums"] = {
        name: [[same[0][0], statistics.fmean(total for _, total in same)] for same in zip(*sums, strict=True)]
        for name in row["sums"] if all(sums := [one["sums"].get(name) for one in group])
    }  # fmt: skip
    for name in columns:
        values = [one[name] for one in group if one.get(name) is not None]
        errors = [one[f"{name}_se"] for one in group if one.get(f"{name}_se") is not None]
        row[name] = None if len(values) < len(group) else Figure(
            statistics.fmean(values),
            statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None,
            _mean_of(row["sums"][name])[1] if name in row["sums"]
            else statistics.fmean(errors) if len(errors) == len(group) else None,
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
    """Return what ``shown`` shows as lines: the mean and each error."""
    numbers, _, exponent = text.removeprefix("(").partition(")")
    return [one + exponent for one in numbers.replace(" ±", "\n±").split("\n")]


def worded(value: Any) -> str:
    """Return a setting as a cell of the table shows it."""
    return DASH if value is None else str(value)


def about(row: CellRow, names: list[str]) -> str:
    """Return the settings of a cell beside its norm, of those that vary."""
    settings = [f"{name.replace('_', ' ')} {worded(row.get(name))}" for name in names if name != "norm"]
    return ", ".join(settings + ([f"{row['seeds']} seeds"] if row["seeds"] > 1 else []))
