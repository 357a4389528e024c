"""minigpt info: what a checkpoint is."""

from typing import Any

from rich.table import Table

from minigpt.cli.options import Json
from minigpt.cli.output import STDOUT, for_terminal, progress, show
from minigpt.errors import listing


def info(model: str = "demo", *, revision: str | None = None, json: Json = False) -> None:
    """Show what a checkpoint is: format, shape, parameters, dtype, norms and tokenizer.

    Of another architecture than GPT-2 the weights are not read.

    Examples:
        minigpt info gpt2
        minigpt info ./out/ckpt.pt --json

        Exit status: 0 it would load, 2 it would not; the error says why.
    """
    from minigpt.checkpoint.contents import Files
    from minigpt.checkpoint.pretrained import describe
    from minigpt.checkpoint.transformers_model import describe_other
    from minigpt.recipe import Recipe
    from minigpt.report.numerals import brief
    from minigpt.tokenizer import Tokenizer

    facts: dict[str, Any] = {"model": model}
    with progress() as say:
        say(f"reading {model}", 0)
        files = Files.at(Recipe(model, revision=revision).place())
        tokenizer = Tokenizer.read(files.folder) if files.has_tokenizer else None
        is_other = files.architecture is not None
        facts |= describe_other(files.place) if is_other else describe(files, tokenizer.id_count if tokenizer else 0)
    if not is_other:
        facts["norms"] = [
            f"{site}: " + ", ".join(f"{name} {brief(low)} to {brief(high)}" for name, (low, high) in ranges.items())
            for site, ranges in facts["norms"].items()
        ]
    facts["tokenizer"] = "none"
    if tokenizer:
        beyond = [token for token, number in tokenizer.backend.get_vocab().items() if number >= facts["vocabulary"]]
        lacking = f"; the model has no embedding for {listing(beyond)}" if beyond else ""
        facts["tokenizer"] = f"{tokenizer.kind} of {tokenizer.vocab_size} tokens{lacking}"
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in facts.items():
        shown = "\n".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
        table.add_row(name, for_terminal(shown))
    show(table, facts, STDOUT if json else None)
