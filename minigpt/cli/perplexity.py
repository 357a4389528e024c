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
        text: Text files in UTF-8, or JSON lines with a "text" in each.
        window: Tokens that the model reads at once; by default its context.
        stride: Tokens between the beginnings of two windows; by default half the window.
        bos: Begin every window with the beginning-of-text token.

    Examples:
        minigpt perplexity gpt2 held-out.txt
        minigpt perplexity gpt2 wiki.test.raw --stride 1024
        minigpt perplexity ./tuned one.txt two.txt stories.jsonl --norm rms --json
    """
    from minigpt.checkpoint.norms import described_norms
    from minigpt.judge.perplexity import mean_perplexities, measure, named_texts

    results: list[tuple[str, Perplexity]] = []
    with progress() as say:
        say(f"reading {text[0]}", 0)
        texts = [named for file in text for named in named_texts(file)]
        if not texts:
            raise GenerationError(f"{text[0]} has no text")
        say(f"reading {recipe.source}", 0)
        model, tokenizer = recipe.load(any_architecture=True)[:2]
        if tokenizer is None:
            raise CheckpointError(f"{text[0]} needs a tokenizer, and {recipe.source} has none")

        def within(words: str, share: float) -> None:
            done = len(results)
            say(f"{texts[done][0]}: {words}", (done + share) / len(texts))

        for name, content in texts:
            within("turning the text into tokens", 0)
            result = measure(model, tokenizer, content, stride, bos, window=window, name=name, progress=within)
            if not math.isfinite(result.perplexity):
                raise GenerationError(
                    f"the perplexity of {name} is {result.perplexity}, since the logits are not finite, or too large"
                )
            results.append((name, result))
    norms = described_norms(model)
    by = f"by {recipe.source} with {norms}"
    fields: dict[str, Any] = {"model": str(recipe.source), "norm": norms, "sites": list(recipe.sites)}
    rows = []
    for name, result in results:
        row = {"text": name} | dataclasses.asdict(result)
        del row["rows"]
        rows.append(row)
    if len(results) == 1 and results[0][0] == str(text[0]):
        ((name, result),) = results
        summary: RenderableType = f"{result.perplexity:.6g}  perplexity of {name} {by}\n{result.protocol}"
        fields |= rows[0]
    else:
        means = mean_perplexities([result for _, result in results])
        summary = Group(
            _table(results),
            f"{means['perplexity']:.6g}  perplexity of the {means['scored']:,} tokens {by}",
            f"{means['perplexity_by_text']:.6g}  perplexity of the {len(results):,} texts, each counted once",
        )
        fields |= means
        fields["texts"] = rows
    show(summary, fields, STDOUT if json else None)


def _table(results: "list[tuple[str, Perplexity]]") -> Table:
    table = Table("text", "perplexity", "loss, nats", "tokens scored", box=None, pad_edge=False)
    for name, result in results:
        table.add_row(Text(name), f"{result.perplexity:.6g}", f"{result.loss:.6g}", f"{result.scored:,}")
    return table
