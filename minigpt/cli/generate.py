"""minigpt generate: write on from a prompt, or from each of a file of them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

import minigpt
from minigpt.cli.files import made_aside, print_json, read_standard_input, require_name, said_aside
from minigpt.cli.many import tokens_at_a_time, write_many
from minigpt.cli.options import Attention, CheckFinite, Device, Dtype, Keep, Model, Norm, Quantize, Revision, parse_keep

EXAMPLES = (
    "Examples:\n\n[bold]minigpt generate 'Once upon a time' --seed 1[/]\n\n"
    "[bold]minigpt generate 'The dog' --model gpt2 --greedy[/]\n\n[bold]minigpt generate - < prompt.txt[/]\n\n"
    "[bold]minigpt generate --prompts prompts.jsonl --out texts.jsonl[/]"
)


def generate(
    context: typer.Context,
    prompt: Annotated[
        str, typer.Argument(help="Text to continue; '-' reads it from standard input; without one, a new text.")
    ] = "",
    model: Model = "demo",
    max_new_tokens: Annotated[int | None, typer.Option(help="Tokens to write at most.  [dim]default 200[/]")] = None,
    min_new_tokens: Annotated[int | None, typer.Option(help="Tokens to write before the text may end.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Divides the logits; 0 is greedy.  [dim]default 0.8[/]")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest tokens only.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest tokens that make up p, in (0, 1].")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Draw only from tokens at least p times as likely as the likeliest.")
    ] = None,
    typical_p: Annotated[float | None, typer.Option(help="Draw from the most typical tokens that make up p.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: less of what was said before.")] = None,
    no_repeat_ngram_size: Annotated[int | None, typer.Option(help="Never write a run of so many tokens twice.")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the likeliest token.")] = False,
    seed: Annotated[int | None, typer.Option(help="Makes the draw repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    overflow: Annotated[
        str | None,
        typer.Option(help="For texts beyond the context: refuse, or slide, which sees the last tokens that fit."),
    ] = None,
    slide_stride: Annotated[int | None, typer.Option(help="Tokens that the window forgets at a time.")] = None,
    lookup: Annotated[
        int | None, typer.Option(help="Copy so many tokens of the text so far as a guess, and verify them at once.")
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help='File of prompts, {"prompt": ...} a line.')] = None,
    out: Annotated[Path | None, typer.Option(help="File for the texts of --prompts; goes on where it ends.")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Texts of --prompts to write at a time.  [dim]default 16[/]")
    ] = None,
    num_return_sequences: Annotated[int | None, typer.Option(help="Texts for each of --prompts.")] = None,
    norm: Norm = "fused",
    keep: Keep = "scale,shift",
    attention: Attention = "sdpa",
    device: Device = None,
    dtype: Dtype = None,
    quantize: Quantize = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the steps with torch.compile first.")] = False,
    revision: Revision = None,
    check_finite: CheckFinite = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
) -> None:
    """Write on from a prompt, or from each of a file of them."""
    given = dict(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p, seed=seed,
        max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens, repetition_penalty=repetition_penalty,
        no_repeat_ngram_size=no_repeat_ngram_size, stop_strings=stop, overflow=overflow, slide_stride=slide_stride,
        prompt_lookup_num_tokens=lookup, num_return_sequences=num_return_sequences,
    )  # fmt: skip
    asked = {name: value for name, value in given.items() if value is not None}
    from minigpt.checkpoint import locate, read_generation_config  # here: help need not wait for PyTorch
    from minigpt.engine import lay_out
    from minigpt.process import settle_memory

    settle_memory()
    _require_compatible(context.params)
    require_name("--out", out)
    place = locate(model, revision=revision)  # once, so that weights, settings and tokenizer are of one commit
    beside = read_generation_config(place)
    settings = _settings(asked, beside, greedy)
    theirs = {name: value for name, value in beside.items() if name not in asked}
    _require_sense(settings, theirs, place, is_one=prompts is None)
    text = read_standard_input() if prompt == "-" else prompt

    with said_aside():
        gpt2 = minigpt.from_pretrained(
            place, norm=norm, keep=parse_keep(keep), attention=attention, device=device, dtype=dtype, quantize=quantize,
            check_finite=check_finite,
        )  # fmt: skip
        if compiled:
            minigpt.compile_steps(gpt2)
        tokenizer = minigpt.Tokenizer.from_pretrained(place)
        if prompts is not None and out is not None:
            size = 16 if batch_size is None else batch_size
            write_many(
                gpt2, tokenizer, prompts, out, settings, size, {"norm": norm, "keep": keep, "attention": attention}
            )
            return
        lay_out(gpt2, tokens_at_a_time(gpt2, settings, 1), settings["max_new_tokens"])
    pieces = made_aside(minigpt.stream(gpt2, tokenizer, text, **settings))
    if as_json:
        print_json({"model": model, "norm": norm, "prompt": text, "text": "".join(pieces), "settings": settings}, "-")
        return
    _print(text, pieces)


def _print(text: str, pieces: Iterator[str]) -> None:
    first = next(pieces, "")  # before anything is shown: a norm may fail
    print(text + first, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


def _require_compatible(given: dict[str, Any]) -> None:
    """Refuse options that cannot go together, or not alone; all of them in one error."""
    from minigpt.generation.settings import SHAPES_A_DRAW

    drawn = [f"--{name.replace('_', '-')}" for name in (*SHAPES_A_DRAW, "seed") if given[name] is not None]
    many, out, copies = given["prompts"] is not None, given["out"], given["num_return_sequences"]
    batched = (given["batch_size"] or 1) > 1
    seeded = given["temperature"] == 0 and given["seed"] is not None
    complaints = (
        (given["greedy"] and drawn, f"--greedy leaves nothing to draw, so it cannot go with {', '.join(drawn)}"),
        (seeded and not given["greedy"], "--temperature 0 leaves nothing to draw, so it cannot go with --seed"),
        (given["lookup"] and many and batched, "--lookup writes one text at a time, so it cannot go with --batch-size"),
        (many and out is None, "--prompts needs --out, the file for the texts"),
        (out is not None and not many, "--out needs --prompts, the file they come from"),
        (many and given["prompt"], "--prompts cannot go with a PROMPT"),
        (many and given["as_json"], "--prompts writes JSON to --out, so it cannot go with --json"),
        (copies not in (None, 1) and not many, "--num-return-sequences needs --prompts"),
        (given["batch_size"] is not None and not many, "--batch-size needs --prompts"),
    )
    if said := [complaint for wrong, complaint in complaints if wrong]:
        raise minigpt.GenerationError("; ".join(said))


def _require_sense(settings: dict[str, Any], unasked: dict[str, Any], place: Path, is_one: bool) -> None:
    """Refuse settings before the weights are read; of what nobody asked for here, the model's own file is named."""
    from minigpt.checkpoint import folder_of
    from minigpt.generation import parse_settings
    from minigpt.generation.decode import require_text_alone

    try:
        chosen = parse_settings(**settings)
        if is_one:
            require_text_alone(chosen)
    except minigpt.GenerationError as error:
        words = re.split(r"[\s,;:]+", re.sub("known are [^;]*", "", str(error)))
        theirs = [name for name, value in unasked.items() if name in words and settings.get(name) == value]
        said = f"; {', '.join(theirs)}: so says {folder_of(place) / 'generation_config.json'}" if theirs else ""
        said += ", and --max-new-tokens goes before it" * ("max_length" in theirs)
        raise minigpt.GenerationError(f"{error}{said}") from error


def _settings(asked: dict[str, Any], beside: dict[str, Any], greedy: bool) -> dict[str, Any]:
    """What is asked for here, else what the model's own generation config says, else to draw at temperature 0.8."""
    from minigpt.generation.settings import SHAPES_A_DRAW

    settings = {"do_sample": True, "max_new_tokens": 200} | beside
    if "max_new_tokens" in {**beside, **asked}:
        settings.pop("max_length", None)  # which the other goes before, as transformers has it
    if greedy or asked.get("temperature", beside.get("temperature")) == 0:  # what the file says of a draw is for one
        unshaped = {name: value for name, value in settings.items() if name not in SHAPES_A_DRAW}
        return unshaped | ({"do_sample": False} if greedy else {"temperature": 0}) | asked
    if any(name in SHAPES_A_DRAW for name in asked):
        settings["do_sample"] = True
    return ({"temperature": 0.8} if settings["do_sample"] else {}) | settings | asked
