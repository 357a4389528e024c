"""minigpt generate: write on from a prompt."""

from typing import Annotated

import typer

import minigpt
from minigpt.cli.files import print_json, read_standard_input
from minigpt.cli.options import Attention, Device, Dtype, Model, Norm, Quantize, Revision

EXAMPLES = (
    "Examples: [bold]minigpt generate 'Once upon a time' --seed 1[/]   "
    "[bold]minigpt generate 'The dog' --model gpt2 --greedy[/]   [bold]minigpt generate - < prompt.txt[/]"
)


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to go on from; '-' reads standard input; none starts anew.")] = "",
    model: Model = "demo",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to write at most.")] = 200,
    temperature: Annotated[
        float | None, typer.Option(help="Divides the logits; 0 is greedy.  [dim]default 0.8[/]")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest tokens only.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest tokens that make up p, in (0, 1].")
    ] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the likeliest token.")] = False,
    seed: Annotated[int | None, typer.Option(help="Makes the draw repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    norm: Norm = "fused",
    attention: Attention = "sdpa",
    device: Device = None,
    dtype: Dtype = None,
    quantize: Quantize = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the steps with torch.compile first.")] = False,
    revision: Revision = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
) -> None:
    """Write on from a prompt."""
    sampling = dict(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    if greedy and (given := [f"--{name.replace('_', '-')}" for name, value in sampling.items() if value is not None]):
        raise minigpt.GenerationError(f"--greedy leaves nothing to draw, so it cannot go with {', '.join(given)}")
    text = read_standard_input() if prompt == "-" else prompt
    settings = dict(sampling, do_sample=not greedy, max_new_tokens=max_new_tokens, stop_strings=stop)
    settings["temperature"] = 1.0 if greedy else 0.8 if temperature is None else temperature

    gpt2 = minigpt.from_pretrained(
        model, norm=norm, attention=attention, device=device, dtype=dtype, quantize=quantize, revision=revision
    )
    if compiled:
        minigpt.compile_steps(gpt2)
    tokenizer = minigpt.Tokenizer.from_pretrained(model, revision=revision)
    pieces = minigpt.stream(gpt2, tokenizer, text, **settings)
    if as_json:
        print_json({"model": model, "norm": norm, "prompt": text, "text": "".join(pieces), "settings": settings}, "-")
        return
    print(text, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
