"""minigpt perplexity: how well a model predicts a text."""

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING

from minigpt.cli.options import Json
from minigpt.cli.output import STDOUT, progress, show
from minigpt.errors import CheckpointError, GenerationError
from minigpt.files import read_text

if TYPE_CHECKING:
    from minigpt.recipe import Recipe


def perplexity(
    recipe: "Recipe",
    text: Path,
    *,
    stride: int | None = None,
    bos: bool = False,
    json: Json = False,
) -> None:
    """Measure the perplexity of a text file: exp of the mean negative log-likelihood of a token.

    Args:
        text: A text file in UTF-8.
        stride: Tokens between the beginnings of two windows; by default half the context.
        bos: Begin every window with the beginning-of-text token.

    Examples:
        minigpt perplexity gpt2 held-out.txt
        minigpt perplexity gpt2 wiki.test.raw --stride 1024
        minigpt perplexity ./tuned held-out.txt --norm rms --json
    """
    from minigpt.checkpoint.norms import described_norms
    from minigpt.judge.perplexity import measure

    content = read_text(text, GenerationError)
    with progress() as say:
        say(f"reading {recipe.source}", 0)
        model, tokenizer = recipe.open()
        if tokenizer is None:
            raise CheckpointError(f"{text} needs a tokenizer, and {recipe.source} has none")
        result, norms = measure(model, tokenizer, content, stride, bos, progress=say), described_norms(model)
    value = result.perplexity
    if not math.isfinite(value):
        raise GenerationError(f"the perplexity of {text} is {value}, since the logits are not finite, or too large")
    summary = f"{value:.6g}  perplexity of {text} by {recipe.source} with {norms}\n{result.protocol}"
    fields = {"model": str(recipe.source), "norm": norms, "sites": list(recipe.sites), "text": str(text)}
    show(summary, fields | dataclasses.asdict(result), STDOUT if json else None)
