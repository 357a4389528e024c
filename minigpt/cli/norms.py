"""minigpt norms: which there are, and whether one is a LayerNorm."""

from typing import Annotated

import typer
from rich.table import Table

import minigpt
from minigpt.cli.files import console, print_json, progress
from minigpt.cli.options import AsJson, Device

EXAMPLES = (
    "Examples:\n\n[bold]minigpt norms[/]\n\n[bold]minigpt norms --check my_norm.py:MyNorm[/]\n\n"
    "Exit status of --check: 0 it is a LayerNorm, 1 it is not, 2 it could not be judged."
)


def norms(
    check: Annotated[str | None, typer.Option(help="Run the conformance kit on this norm; no model is needed.")] = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """List the registered norms, or check whether one is a LayerNorm."""
    if check is None:
        if device is not None:
            raise minigpt.ConfigError("--device is where --check asks a norm, and there is none to ask")
        _list_norms(as_json)
        return
    from minigpt.conformance import check_norm
    from minigpt.report.conformance_summary import conformance_summary

    with progress() as say:
        report = check_norm(check, device=device, progress=say)
    if as_json:
        print_json(report.to_dict(), "-")
    else:
        console().print(conformance_summary(report))
    raise typer.Exit(0 if report.passed else 1)


def _list_norms(as_json: bool) -> None:
    known = minigpt.norms.available()
    if as_json:
        print_json({name: info.to_dict() for name, info in known.items()}, "-")
        return
    table = Table("norm", "exact", "what it is", box=None, pad_edge=False)
    for name, info in sorted(known.items()):
        table.add_row(name, "yes" if info.exact else "no", info.reason or info.summary)
    console().print(table)
