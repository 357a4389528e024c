"""minigpt perplexity: how well a model predicts texts."""

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from minigpt.cli.options import Json
from minigpt.cli.output import STDOUT, progress, show
from minigpt.errors import CheckpointError, GenerationError

if TYPE_CHECKING:
    from minigpt.judge.perplexity import Perplexity
    from minigpt.recipe import Recipe


class NamedText(NamedTuple):
    """A text, and its name in messages."""

    name: str
    content: str


class NamedPerplexity(NamedTuple):
    """The perplexity of a text."""

    name: str
    perplexity: "Perplexity"

    def fields(self) -> dict[str, Any]:
        """Return what JSON shows of it."""
        fields = {"text": self.name} | dataclasses.asdict(self.perplexity)
        del fields["rows"]
        return fields


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

    results: list[NamedPerplexity] = []
    with progress() as say:
        say(f"reading {text[0]}", 0)
        texts = [NamedText(name, content) for file in text for name, content in named_texts(file)]
        if not texts:
            raise GenerationError(f"{text[0]} has no text")
        say(f"reading {recipe.source}", 0)
        model, tokenizer = recipe.load(any_architecture=True)[:2]
        if tokenizer is None:
            raise CheckpointError(f"{text[0]} needs a tokenizer, and {recipe.source} has none")

        def within(words: str, share: float) -> None:
            done = len(results)
            say(f"{texts[done].name}: {words}", (done + share) / len(texts))

        for name, content in texts:
            within("turning the text into tokens", 0)
            result = measure(model, tokenizer, content, stride, bos, window=window, name=name, progress=within)
            if not math.isfinite(result.perplexity):
                raise GenerationError(
                    f"the perplexity of {name} is {result.perplexity}, since the logits are not finite, or too large"
                )
            results.append(NamedPerplexity(name, result))
    norms = described_norms(model)
    by = f"by {recipe.source} with {norms}"
    fields: dict[str, Any] = {"model": str(recipe.source), "norm": norms, "sites": list(recipe.sites)}
    rows = [result.fields() for result in results]
    if len(results) == 1 and results[0].name == str(text[0]):
        ((name, result),) = results
        summary: RenderableType = f"{result.perplexity:.6g}  perplexity of {name} {by}\n{result.protocol}"
        fields |= rows[0]
    else:
        means = mean_perplexities([result.perplexity for result in results])
        summary = Group(
            _table(results),
            f"{means['perplexity']:.6g}  perplexity of the {means['scored']:,} tokens {by}",
            f"{means['perplexity_by_text']:.6g}  perplexity of the {len(results):,} texts, each counted once",
        )
        fields |= means
        fields["texts"] = rows
    show(summary, fields, STDOUT if json else None)


def _table(results: list[NamedPerplexity]) -> Table:
    table = Table("text", "perplexity", "loss, nats", "tokens scored", box=None, pad_edge=False)
    for name, result in results:
        table.add_row(Text(name), f"{result.perplexity:.6g}", f"{result.loss:.6g}", f"{result.scored:,}")
    return table
