"""A study's rows on the terminal, as CSV, and as one page."""

import csv
import io
import os
from pathlib import Path
from typing import Any

from rich.table import Table

COLUMNS = ("model", "norm", "sites", "seed", "verdict", "ratio", "kl_mean", "top1_agreement", "perplexity_before",
           "perplexity_after", "perplexity_recovered", "kl_recovered", "top1_recovered", "decode_norm_share",
           "seconds")  # fmt: skip
WIDTH, HEIGHT = 640, 280  # of a plot

Row = dict[str, Any]


def summary(rows: list[Row]) -> Table:
    """Return the most important columns for the terminal. A model, sites or a seed that all cells share is left out."""
    names = ["norm", *(name for name in ("model", "sites", "seed") if len({row[name] for row in rows}) > 1)]
    figures = {"verdict": "verdict", "of noise": "ratio", "KL mean": "kl_mean", "perplexity": "perplexity_before",
               "swapped": "perplexity_after", "recovered": "perplexity_recovered"}  # fmt: skip
    table = Table(*names, *figures, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(shown(row[name]) for name in (*names, *figures.values())))
    return table


def csv_table(rows: list[Row]) -> str:
    """Return the table as CSV."""
    text = io.StringIO()
    writer: csv.DictWriter[str] = csv.DictWriter(
        text, (*COLUMNS, "command"), extrasaction="ignore", lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def page(rows: list[Row], title: str, out: Path, html: Path) -> str:
    """Return one self-contained page: the table, sortable, and the curves of the held-out loss."""
    import jinja2

    loader = jinja2.PackageLoader("minigpt", "report/templates")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["shown"] = shown
    reports = os.path.relpath(out, html.parent or ".")
    template = environment.get_template("study.html")
    return template.render(title=title, rows=rows, columns=COLUMNS, curves=curves(rows), reports=reports,
                           width=WIDTH, height=HEIGHT)  # fmt: skip


def curves(rows: list[Row]) -> list[dict[str, Any]]:
    """Return each row's curve of held-out loss, or of loss, as points of a plot; with the steps of its swaps."""
    lines = [(row, row.get("eval_losses") or row.get("losses") or []) for row in rows]
    points = [point for _, line in lines for point in line]
    if not points:
        return []
    last = max(step for step, _ in points) or 1
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)
    span = (high - low) or 1.0

    def x(step: int) -> float:
        return round(step / last * WIDTH, 1)

    return [
        {
            "name": f"{row['model']} {row['norm']} {row['sites']} {row['seed']}",
            "hue": round(360 * place / len(lines)),
            "points": " ".join(f"{x(step)},{round((high - loss) / span * HEIGHT, 1)}" for step, loss in line),
            "swaps": sorted({x(step) for step in row.get("swaps", {}).values()}),
            "first": line[0],
            "last": line[-1],
        }
        for place, (row, line) in enumerate(lines)
        if line
    ]


def shown(value: Any) -> str:
    """Return a value as a cell of the table shows it."""
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) else str(value)
