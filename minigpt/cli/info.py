"""minigpt info: what a checkpoint is."""

from typing import Annotated

import typer
from rich.table import Table

from minigpt.cli.options import SHARED, Json, named_model
from minigpt.cli.output import for_terminal, show
from minigpt.errors import CheckpointError, ConfigError


def info(
    name: Annotated[str | None, typer.Argument(metavar="MODEL", help=SHARED["model"])] = None,
    *,
    model: str | None = None,
    revision: str | None = None,
    json_file: Json = None,
) -> None:
    """Show what a checkpoint is: format, shape, parameters, dtype, norms, tokenizer, and why it would not load.

    Examples:
        minigpt info gpt2
        minigpt info ./out/ckpt.pt --json

        Exit status: 0 it would load, 2 it would not, and why.
    """
    from minigpt.report.describe import describe

    if name is not None and model is not None:
        raise ConfigError("is given twice, as an argument and as an option", argument="model")
    facts = describe(named_model(model if name is None else name), revision=revision)
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in facts.items():
        shown = "\n".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
        table.add_row(name, for_terminal(shown))
    show(table, facts, json_file)
    if facts["refused"]:
        raise CheckpointError("; ".join(facts["refused"]))
