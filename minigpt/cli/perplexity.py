"""minigpt perplexity: how well a model predicts a text."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from minigpt.cli.options import Json
from minigpt.cli.output import progress, show
from minigpt.errors import CheckpointError, GenerationError
from minigpt.files import read_text

if TYPE_CHECKING:
    from minigpt.recipe import Recipe


def perplexity(
    recipe: "Recipe",
    text: Path,
    *,
    json_file: Json = None,
) -> None:
    """Measure the perplexity of a text file: exp of the mean negative log-likelihood of a token.

    Args:
        text: A text file in UTF-8.

    Examples:
        minigpt perplexity gpt2 held-out.txt
        minigpt perplexity --model ./tuned --text held-out.txt --norm rms --json
    """
    from minigpt.checkpoint.norms import described_norms
    from minigpt.judge.perplexity import perplexity as perplexity_of

    content = read_text(text, GenerationError)
    with progress() as say:
        say(f"reading {recipe.source}", 0)
        model, tokenizer = recipe.open()
        if tokenizer is None:
            raise CheckpointError(f"{text} needs a tokenizer, and {recipe.source} has none")
        result, tokens = perplexity_of(model, tokenizer, content, progress=say), len(tokenizer.encode(content))
        norms = described_norms(model)
    if not math.isfinite(result):
        raise GenerationError(f"the perplexity of {text} is {result}, since the logits are not finite, or too large")
    summary = f"{result:.6g}  perplexity of {text}, {tokens:,} tokens, by {recipe.source} with {norms}"
    fields = {"model": str(recipe.source), "norm": norms, "sites": list(recipe.sites), "text": str(text)}
    show(summary, fields | {"tokens": tokens, "perplexity": result}, json_file)
