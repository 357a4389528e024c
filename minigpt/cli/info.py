"""minigpt info: what a checkpoint is."""

from typing import Annotated

import typer
from rich.table import Table

from minigpt.cli.files import console, print_json
from minigpt.cli.options import Revision


def info(
    model: Annotated[str, typer.Argument(help="A directory, .safetensors file, Hugging Face id, or 'demo'.")] = "demo",
    revision: Revision = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a checkpoint is: shapes, parameters, dtype, norms, and where its files lie."""
    from minigpt.lab.describe import describe

    facts = describe(model, revision=revision)
    if as_json:
        print_json(facts, "-")
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in facts.items():
        table.add_row(name, "\n".join(map(str, value)) if isinstance(value, list) else str(value))
    console().print(table)
