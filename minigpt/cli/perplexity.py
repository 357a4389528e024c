"""minigpt perplexity: how well a model predicts texts."""

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from minigpt.cli.options import JsonFile
from minigpt.cli.output import progress, show
from minigpt.errors import CheckpointError, GenerationError

if TYPE_CHECKING:
    from minigpt.recipe import Recipe
    from minigpt.scoring import Perplexity


def perplexity(
    recipe: "Recipe",
    text: list[Path],
    *,
    window: int | None = None,
    stride: int | None = None,
    bos: bool = False,
    json_file: JsonFile = None,
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
    from minigpt.report.numerals import count, precise
    from minigpt.report.parts import Cell, Number, Part, cell
    from minigpt.report.terminal import printed
    from minigpt.scoring import mean_perplexities, measure_perplexity, named_texts

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
            result = measure_perplexity(
                model, tokenizer, content, stride, bos, window=window, name=name, progress=within
            )
            if not math.isfinite(result.perplexity):
                raise GenerationError(
                    f"the perplexity of {name} is {result.perplexity}, since the logits are not finite, or too large"
                )
            results.append((name, result))
    norms = described_norms(model)
    by = f"by {recipe.source} with {norms}"
    fields: dict[str, Any] = {"model": str(recipe.source), "norm": norms, "sites": list(recipe.sites)}
    texts_fields = []
    rows: list[list[Cell]] = []
    for name, result in results:
        of_text = {"text": name} | dataclasses.asdict(result)
        del of_text["rows"]
        texts_fields.append(of_text)
        rows.append(
            [name, cell(result, "perplexity", precise), cell(result, "loss", precise), cell(result, "scored", count)]
        )
    if len(results) == 1 and results[0][0] == str(text[0]):
        ((name, result),) = results
        summary: RenderableType = f"{precise(result.perplexity)}  perplexity of {name} {by}\n{result.protocol}"
        fields |= texts_fields[0]
    else:
        means = mean_perplexities([result for _, result in results])
        rows.append(["all tokens", Number(means["perplexity"], precise), None, Number(means["scored"], count)])
        rows.append(["each text counted once", Number(means["perplexity_by_text"], precise), None, None])
        heads = ("text", "perplexity", "loss, nats", "tokens scored")
        summary = Group(*printed([Part("texts", "Perplexity", f"Of texts, {by}.", heads, rows)]))
        fields |= means
        fields["texts"] = texts_fields
    show(summary, fields, json_file)
