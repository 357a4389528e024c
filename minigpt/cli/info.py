"""minigpt info: what a checkpoint is."""

from rich.table import Table

from minigpt.cli.files import for_terminal, show
from minigpt.cli.options import AsJson
from minigpt.errors import CheckpointError


def info(model: str = "demo", *, revision: str | None = None, as_json: AsJson = False) -> None:
    """Show what a checkpoint is: format, shape, parameters, dtype, norms, tokenizer, and why it would not load.

    Examples:
        minigpt info gpt2
        minigpt info ./out/ckpt.pt --json

        Exit status: 0 it would load, 2 it would not, and why.
    """
    from minigpt.report.describe import describe

    facts = describe(model, revision=revision)
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in facts.items():
        shown = "\n".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
        table.add_row(name, for_terminal(shown))
    show(table, facts, "-" if as_json else None)
    if facts["refused"]:
        raise CheckpointError("; ".join(facts["refused"]))
