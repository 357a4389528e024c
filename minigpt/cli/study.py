"""minigpt study: a table of models x norms x sites x seeds."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from minigpt.cli.options import LaterFile, OutFolder, Ray
from minigpt.cli.output import ResultConsole, check_writable, progress, write


def study(
    file: Path,
    *,
    out: OutFolder,
    html: LaterFile = None,
    csv: LaterFile = None,
    only: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE")] = None,
    ray: Ray = None,
) -> None:
    """Judge every cell of a study, train it where asked, and append one line of JSON when it is finished.

    The status is 1 if a cell failed, diverged, or has a figure that could not be measured.

    Args:
        file: The study: models, norms, sites, seeds, text, [finetune].
        out: Folder for cells.jsonl, the reports and the training runs.
        html: Write the tables and the figures here as one page.
        csv: Write the table here.
        only: Only cells with this value; may be repeated.

    Examples:
        minigpt study study.toml --out results --html results/study.html

        Started again, it runs only the cells that OUT/cells.jsonl lacks. A cell whose text, norm, model or settings
        have changed runs again.
    """
    for target in (html, csv):
        _check_target(target, out)
    with progress() as say:
        say("checking", 0.0)
        from minigpt.study.file import read_study
        from minigpt.study.run import run_study
        from minigpt.study.study import cells_with

        plan = read_study(file)
        out.mkdir(parents=True, exist_ok=True)
        rows = run_study(plan, out, say, file=file, ray=ray, cells=cells_with(plan, only or []))
    from minigpt.report.terminal import printed
    from minigpt.study import page, table

    console = ResultConsole()
    console.print(*printed([table.terminal_part(rows)]))
    reasons = []
    for row in rows:
        if row.get("reason"):
            model = f"{row['model']} " * (len(plan.models) > 1)
            reasons.append(f"{model}{row['norm']} {row['sites']} seed {row['seed']}: {row['reason']}")
    console.print("\n".join(reasons), end="\n" * bool(reasons))
    if csv is not None:
        write(csv, table.csv_table(rows))
    if html is not None:
        write(html, page.page(rows, file.stem, out, html, shlex.join(["minigpt", *sys.argv[1:]])))
    if reasons:
        raise typer.Exit(1)


def _check_target(target: Path | None, out: Path) -> None:
    """Check that a file can be written at the end, also where its folder is OUT, which this command makes.

    Raises:
        MiniGPTError: if it cannot.
    """
    is_new = target is not None and not out.exists() and target.absolute().parent == out.absolute()
    if not is_new:
        check_writable(target)
