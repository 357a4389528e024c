"""minigpt perplexity: how well a model predicts texts."""

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from minigpt.cli.options import Json
from minigpt.cli.output import STDOUT, progress, show
from minigpt.errors import CheckpointError, GenerationError

if TYPE_CHECKING:
    from minigpt.judge.perplexity import Perplexity
    from minigpt.recipe import Recipe


def perplexity(
    recipe: "Recipe",
    text: list[Path],
    *,
    window: int | None = None,
    stride: int | None = None,
    bos: bool = False,
    json: Json = False,
) -> None:
    """Measure the perplexity of texts: exp of the mean negative log-likelihood of a token.

    Args:
        text: Text files in UTF-8, or .jsonl files with a "text" in each line.
        window: Tokens that the model reads at once; by default its context.
        stride: Tokens between the beginnings of two windows; by default half the window.
        bos: Begin every window with the beginning-of-text token.

    Examples:
        minigpt perplexity gpt2 held-out.txt
        minigpt perplexity gpt2 wiki.test.raw --stride 1024
        minigpt perplexity ./tuned one.txt two.txt stories.jsonl --norm rms --json
    """
    from minigpt.checkpoint.norms import described_norms
    from minigpt.judge.perplexity import JSON_LINES, mean_perplexities, measure, texts_of

    contents: dict[str, str] = {}
    for file in text:
        for number, content in enumerate(texts_of(file), 1):
            contents[f"{file}:{number}" if file.suffix in JSON_LINES else str(file)] = content
    if not contents:
        raise GenerationError(f"{text[0]} has no text")
    results: dict[str, Perplexity] = {}
    with progress() as say:
        say(f"reading {recipe.source}", 0)
        model, tokenizer = recipe.open()
        if tokenizer is None:
            raise CheckpointError(f"{text[0]} needs a tokenizer, and {recipe.source} has none")
        norms = described_norms(model)
        for number, (name, content) in enumerate(contents.items()):

            def within(words: str, share: float, name: str = name, number: int = number) -> None:
                say(f"{name}: {words}", (number + share) / len(contents))

            result = measure(model, tokenizer, content, stride, bos, window=window, name=name, progress=within)
            if not math.isfinite(result.perplexity):
                raise GenerationError(
                    f"the perplexity of {name} is {result.perplexity}, since the logits are not finite, or too large"
                )
            results[name] = result
    fields: dict[str, Any] = {"model": str(recipe.source), "norm": norms, "sites": list(recipe.sites)}
    rows = [{"text": name, **_fields(result)} for name, result in results.items()]
    by = f"by {recipe.source} with {norms}"
    if len(text) == 1 and text[0].suffix not in JSON_LINES:
        ((name, result),) = results.items()
        summary: RenderableType = f"{result.perplexity:.6g}  perplexity of {name} {by}\n{result.protocol}"
        fields |= rows[0]
    else:
        means = mean_perplexities([*results.values()])
        summary = Group(_table(results), _means(means, len(results), by))
        fields |= means | {"texts": rows}
    show(summary, fields, STDOUT if json else None)


def _fields(result: "Perplexity") -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(result).items() if name != "rows"}


def _table(results: "dict[str, Perplexity]") -> Table:
    table = Table("text", "perplexity", "loss, nats", "tokens scored", box=None, pad_edge=False)
    for name, result in results.items():
        table.add_row(Text(name), f"{result.perplexity:.6g}", f"{result.loss:.6g}", f"{result.scored:,}")
    return table


def _means(means: dict[str, float], texts: int, by: str) -> str:
    return (
        f"{means['perplexity']:.6g}  perplexity of the {means['scored']:,} tokens {by}\n"
        f"{means['perplexity_by_text']:.6g}  perplexity of the {texts:,} texts, each counted once"
    )
