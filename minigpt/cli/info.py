"""minigpt info: what a checkpoint is."""

from typing import TYPE_CHECKING, Any

from rich.table import Table

from minigpt.cli.options import JsonFile
from minigpt.cli.output import progress, show
from minigpt.errors import listing

if TYPE_CHECKING:
    from minigpt.tokenizer import Tokenizer


def info(model: str = "demo", *, revision: str | None = None, json_file: JsonFile = None) -> None:
    """Show what a checkpoint is: format, shape, parameters, dtype, norms and tokenizer.

    Of another architecture than GPT-2 the weights are not read.

    Examples:
        minigpt info gpt2
        minigpt info ./out/ckpt.pt --json

        Exit status: 0 it would load, 2 it would not; the error says why.
    """
    from minigpt.checkpoint.contents import Files
    from minigpt.checkpoint.pretrained import describe_checkpoint
    from minigpt.checkpoint.transformers_model import describe_other
    from minigpt.recipe import Recipe
    from minigpt.tokenizer import Tokenizer

    facts: dict[str, Any] = {"model": model}
    with progress() as say:
        say(f"reading {model}", 0)
        files = Files.at(Recipe(model, revision=revision).place())
        tokenizer = Tokenizer.read(files.folder, files.config or {}) if files.has_tokenizer else None
        if files.architecture is not None:
            facts |= describe_other(files.place)
        else:
            facts |= describe_checkpoint(files, tokenizer.id_count if tokenizer else 0)
            facts["norms"] = _norm_lines(facts["norms"])
    facts["tokenizer"] = "none"
    if tokenizer:
        facts["tokenizer"] = _tokenizer_line(tokenizer, facts["vocabulary"])
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in facts.items():
        lines = value if isinstance(value, list) else [value]
        shown = "\n".join(map(str, lines)) or "none"
        table.add_row(name, shown)
    show(table, facts, json_file)


def _norm_lines(sites: dict[str, dict[str, tuple[float, float]]]) -> list[str]:
    """Return a line for each norm site, with the range of each of its Parameters."""
    from minigpt.report.numerals import brief

    lines: list[str] = []
    for site, ranges in sites.items():
        spans: list[str] = []
        for name, (low, high) in ranges.items():
            spans.append(f"{name} {brief(low)} to {brief(high)}")
        lines.append(f"{site}: {', '.join(spans)}")
    return lines


def _tokenizer_line(tokenizer: "Tokenizer", vocabulary: int) -> str:
    """Return the kind and the size of a tokenizer, and the tokens that a model of this vocabulary lacks."""
    beyond: list[str] = []
    for token, number in tokenizer.backend.get_vocab().items():
        if number >= vocabulary:
            beyond.append(token)
    about = f"{tokenizer.kind} of {tokenizer.vocab_size} tokens"
    if beyond:
        about += f"; the model has no embedding for {listing(beyond)}"
    return about
