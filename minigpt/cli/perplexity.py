"""minigpt perplexity: how well a model predicts a text."""

from pathlib import Path
from typing import Annotated, Any

import typer

import minigpt
from minigpt.cli.files import progress, show
from minigpt.cli.options import AsJson, Ray, norm_at
from minigpt.files import read_text


def perplexity(
    given: Annotated[list[str] | None, typer.Argument(metavar="MODEL TEXT")] = None,
    *,
    model: str | None = None,
    text: str | None = None,
    norm: str = "fused",
    sites: str = "*",
    device: str | None = None,
    dtype: str | None = None,
    quantize: str | None = None,
    revision: str | None = None,
    ray: Ray = None,
    as_json: AsJson = False,
) -> None:
    """Measure the perplexity of a text file: exp of the mean negative log-likelihood of a token.

    Args:
        given: The model and the text, in place of the options.
        text: A text file in UTF-8.

    Examples:
        minigpt perplexity gpt2 held-out.txt
        minigpt perplexity --model ./tuned --text held-out.txt --norm rms --json
    """
    from minigpt.checkpoint import locate

    named = [model, text]
    if named.count(None) != len(given or []):
        raise minigpt.ConfigError("perplexity needs a model and a text: MODEL TEXT, or --model and --text")
    model, text = (value or (given or []).pop(0) for value in named)
    content = read_text(Path(text), minigpt.GenerationError)
    with progress() as say:
        say(f"reading {model}", 0)
        place = locate(model, revision=revision)
        how: dict[str, Any] = {"norm": norm_at(norm, sites), "device": device, "dtype": dtype, "quantize": quantize}
        tokenizer = minigpt.Tokenizer.from_pretrained(place)
        if ray is None:
            found = minigpt.perplexity(minigpt.from_pretrained(place, **how), tokenizer, content, progress=say)
        else:
            from minigpt.study.cluster import perplexity_on_ray

            found = perplexity_on_ray(ray, place, how, tokenizer, content)
    tokens = len(tokenizer.encode(content))
    fields = {"model": model, "norm": norm, "sites": sites.split(","), "text": text, "tokens": tokens}
    changed = "" if norm == "fused" else f" with {norm}"
    said = f"{found:.6g}  perplexity of {text}, {tokens:,} tokens, by {model}{changed}"
    show(said, fields | {"perplexity": found}, "-" if as_json else None)
