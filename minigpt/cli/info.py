"""minigpt info: what a checkpoint is."""

from typing import Annotated

import typer
from rich.table import Table

from minigpt.cli.files import console, for_terminal, print_json
from minigpt.cli.options import SOURCE, AsJson, Revision
from minigpt.errors import CheckpointError

EXAMPLES = (
    "Examples:\n\n[bold]minigpt info gpt2[/]\n\n[bold]minigpt info ./out/ckpt.pt --json[/]\n\n"
    "Exit status: 0 it would load, 2 it would not, and why."
)


def info(
    model: Annotated[str, typer.Argument(help=SOURCE)] = "demo",
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint is: format, shape, parameters, dtype, norms, tokenizer, and why it would not load."""
    from minigpt.report.describe import describe

    facts = describe(model, revision=revision)
    if as_json:
        print_json(facts, "-")
    else:
        table = Table(show_header=False, box=None, pad_edge=False)
        for name, value in facts.items():
            shown = "\n".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
            table.add_row(name, for_terminal(shown))
        console().print(table)
    if facts["refused"]:
        raise CheckpointError("; ".join(facts["refused"]))
