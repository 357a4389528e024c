"""minigpt perplexity: how well a model predicts a text."""

from pathlib import Path
from typing import Annotated, Any

import typer

import minigpt
from minigpt.cli.files import console, print_json, said_aside
from minigpt.cli.options import SOURCE, AsJson, Device, Dtype, Norm, Quantize, Ray, Revision
from minigpt.text_file import read_text

EXAMPLES = (
    "Examples:\n\n[bold]minigpt perplexity gpt2 held-out.txt[/]\n\n"
    "[bold]minigpt perplexity ./tuned held-out.txt --norm rms --json[/]"
)


def perplexity(
    model: Annotated[str, typer.Argument(help=SOURCE)],
    text: Annotated[Path, typer.Argument(help="A text file in UTF-8.")],
    norm: Norm = "fused",
    sites: Annotated[str, typer.Option(help="Where to put it, e.g. 'h.*.ln_1', or 'ln_f,h.0.*'.")] = "*",
    device: Device = None,
    dtype: Dtype = None,
    quantize: Quantize = None,
    revision: Revision = None,
    ray: Ray = None,
    as_json: AsJson = False,
) -> None:
    """Measure the perplexity of a text file: exp of the mean negative log-likelihood of a token."""
    from minigpt.checkpoint import locate

    content = read_text(text, minigpt.GenerationError)
    with said_aside():
        # "fused", the default, leaves the norms that the checkpoint names.
        chosen = norm if norm == "fused" else dict.fromkeys(sites.split(","), norm)
        place = locate(model, revision=revision)
        how: dict[str, Any] = {"norm": chosen, "device": device, "dtype": dtype, "quantize": quantize}
        tokenizer = minigpt.Tokenizer.from_pretrained(place)
        if ray is None:
            found = minigpt.perplexity(minigpt.from_pretrained(place, **how), tokenizer, content)
        else:
            from minigpt.study.cluster import perplexity_on_ray

            found = perplexity_on_ray(ray, place, how, tokenizer, content)
    tokens = len(tokenizer.encode(content))
    if as_json:
        fields = {"model": model, "norm": norm, "sites": sites.split(","), "text": str(text), "tokens": tokens}
        print_json(fields | {"perplexity": found}, "-")
    else:
        changed = "" if norm == "fused" else f" with {norm}"
        console().print(f"{found:.6g}  perplexity of {text}, {tokens:,} tokens, by {model}{changed}")
