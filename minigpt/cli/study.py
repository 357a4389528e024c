"""minigpt study: a table of models x norms x sites x seeds."""

from pathlib import Path
from typing import Annotated

import typer

from minigpt.cli.files import console, progress, require_writable, write
from minigpt.cli.options import Ray


def study(
    file: Path,
    *,
    out: Path,
    html: Path | None = None,
    csv: Path | None = None,
    only: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE")] = None,
    ray: Ray = None,
) -> None:
    """Judge every cell of a study, train it where asked, and append one line of JSON when it is finished.

    Args:
        file: The study: models, norms, sites, seeds, text, [finetune].
        out: Folder for cells.jsonl, the reports and the training runs.
        html: Write the table and the curves here as one page.
        csv: Write the table here.
        only: Only cells with this value; may be repeated.

    Examples:
        minigpt study study.toml --out results --html results/study.html

        Started again, it runs only the cells that OUT/cells.jsonl lacks. A cell whose text, norm, model or settings
        have changed runs again.
    """
    with progress() as say:
        say("checking", 0.0)
        from minigpt.study import read_study, run_study
        from minigpt.study.study import only as cells_with

        asked = read_study(file)
        out.mkdir(parents=True, exist_ok=True)
        require_writable(html, csv)
        rows = run_study(asked, out, say, file=file, ray=ray, cells=cells_with(asked, only or []))
    from minigpt.study.table import csv_table, page, summary

    console().print(summary(rows))
    if csv is not None:
        write(csv, csv_table(rows))
    if html is not None:
        write(html, page(rows, file.stem, out, html))
