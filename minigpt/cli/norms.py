"""minigpt norms: list the norms, or check whether one is a LayerNorm."""

from typing import Annotated

import typer
from rich.table import Table

from minigpt.cli.options import Json, OutFile
from minigpt.cli.output import STDOUT, progress, show
from minigpt.errors import ConfigError


def norms(
    *,
    check: str | None = None,
    dtype: str = "float32",
    every_case: Annotated[bool, typer.Option("--all")] = False,
    html: OutFile = None,
    device: str | None = None,
    seed: int | None = None,
    json: Json = False,
) -> None:
    """List the registered norms, or check whether one is a LayerNorm.

    Args:
        check: Run the conformance kit on this norm; no model is needed.
        dtype: The dtype that verdict and exit status are about.
        every_case: Print every case of --check.
        seed: Of the rows and weights of --check; a fresh one by default, which the report prints.
        html: Write the report of --check to this file, as a page.

    Examples:
        minigpt norms
        minigpt norms --check my_norm.py:MyNorm

        Exit status of --check: 0 the norm is a LayerNorm at --dtype, 1 it is not, 2 it could not be judged.
    """
    from minigpt.device import resolve_dtype
    from minigpt.norms import available

    if check is None:
        if device is not None or html is not None or every_case or seed is not None:
            raise ConfigError("--device, --all, --html and --seed are for --check NAME")
        known = available()
        table = Table("norm", "exact", "what it is", box=None, pad_edge=False)
        for name, info in sorted(known.items()):
            table.add_row(name, "yes" if info.exact else "no", info.reason or info.summary)
        show(table, {name: info.to_dict() for name, info in known.items()}, STDOUT if json else None)
        return
    from minigpt.conformance import check_norm
    from minigpt.conformance.summary import conformance_page, conformance_summary

    resolve_dtype(dtype)
    with progress(lines=True) as say:
        report = check_norm(check, device=device, progress=say, seed=seed)
    summary = conformance_summary(report, dtype, every_case=every_case)
    show(summary, report.to_dict(), STDOUT if json else None, html, lambda: conformance_page(report, dtype))
    raise typer.Exit({True: 0, False: 1, None: 2}[report.dtypes.get(dtype)])
