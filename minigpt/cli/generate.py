"""minigpt generate: continue a prompt, or each prompt of a file."""

import re
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

import minigpt
from minigpt.cli import options
from minigpt.cli.files import for_terminal, print_json, read_standard_input, said_aside
from minigpt.cli.many import write_many

EXAMPLES = (
    "Examples:\n\n[bold]minigpt generate 'Once upon a time' --seed 1[/]\n\n"
    "[bold]minigpt generate 'The dog' --model gpt2 --greedy[/]\n\n[bold]minigpt generate - < prompt.txt[/]\n\n"
    "[bold]minigpt generate --prompts prompts.jsonl --out texts.jsonl[/]\n\n"
    "The options have the names of minigpt.generate's settings. Two defaults differ, for a reader's sake: 200 "
    "new tokens, drawn at temperature 0.8; in Python max_new_tokens is required and do_sample is off."
)


def generate(
    context: typer.Context,
    prompt: Annotated[
        str, typer.Argument(help="Text to continue; '-' reads it from standard input; without one, a new text.")
    ] = "",
    model: options.Model = "demo",
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
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: less of what was said before.")] = None,
    no_repeat_ngram_size: Annotated[int | None, typer.Option(help="Never write a run of so many tokens twice.")] = None,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Always the likeliest token: do_sample=False in Python.")
    ] = False,
    seed: Annotated[int | None, typer.Option(help="Makes the draw repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    overflow: Annotated[
        str | None,
        typer.Option(
            help="For texts beyond the context: refuse, or slide, which sees the last tokens that fit.",
            autocompletion=options.offer(lambda: ["refuse", "slide"]),
        ),
    ] = None,
    slide_stride: Annotated[int | None, typer.Option(help="Tokens that the window forgets at a time.")] = None,
    prompt_lookup_num_tokens: Annotated[
        int | None,
        typer.Option(
            "--prompt-lookup-num-tokens", "--lookup",
            help="Copy so many tokens of the text so far as a guess, and verify them at once.",
        ),
    ] = None,
    draft: options.Draft = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help='File of prompts, one a line or {"prompt": ...} a line; or a quoted pattern of files.'),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File for the texts of --prompts, or folder for a pattern; resumes.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Texts of --prompts to write at a time.  [dim]default 16[/]")
    ] = None,
    num_return_sequences: Annotated[int | None, typer.Option(help="Texts for each of --prompts.")] = None,
    norm: options.Norm = "fused",
    sites: options.Sites = "*",
    keep: options.Keep = "scale,shift",
    fit: options.Fit = None,
    attention: options.Attention = "sdpa",
    device: options.Device = None,
    dtype: options.Dtype = None,
    quantize: options.Quantize = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the steps with torch.compile first.")] = False,
    revision: options.Revision = None,
    ray: options.Ray = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
) -> None:  # fmt: skip
    """Continue a prompt, or each prompt of a file."""
    from minigpt.checkpoint import locate, read_generation_config  # not at the top: --help need not wait for PyTorch
    from minigpt.generation.settings import known_settings
    from minigpt.process import settle_memory
    from minigpt.swap import fit_on_text

    settle_memory()
    _check_options(context.params)
    named = context.params.keys() & set(known_settings())
    asked = {name: context.params[name] for name in named if context.params[name] is not None}
    place = locate(model, revision=revision)  # once, so that all files come from one commit
    from_file = read_generation_config(place)
    settings = _settings(asked, from_file, greedy)
    unasked = {name: value for name, value in from_file.items() if name not in asked}
    _check_settings(settings, unasked, named - unasked.keys(), place, one_text=prompts is None)
    text = read_standard_input() if prompt == "-" else prompt

    output = sys.stdout
    with said_aside():
        how: dict[str, Any] = {
            "norm": options.norm_at(norm, sites), "keep": options.parse_keep(keep), "attention": attention,
            "device": device, "dtype": dtype, "quantize": quantize,
        }  # fmt: skip
        gpt2 = minigpt.from_pretrained(place, **how)
        tokenizer = minigpt.Tokenizer.from_pretrained(place)
        if fit is not None:
            fit_on_text(gpt2, tokenizer, fit)
        if compiled:
            minigpt.compile_steps(gpt2)
        if prompts is not None and out is not None:
            size = 16 if batch_size is None else batch_size
            identity = {"norm": norm, "keep": keep, "attention": attention}
            identity |= {"fit": str(fit)} if fit else {}
            identity |= {"sites": sites} if sites != "*" else {}
            complete = None
            if ray is not None:
                from minigpt.study.cluster import complete_on_ray

                complete = partial(complete_on_ray, ray, place, how)
            write_many(gpt2, tokenizer, prompts, out, settings, size, identity, complete)
            return
        if not as_json:
            _print(text, minigpt.stream(gpt2, tokenizer, text, **settings), output)
            return
        begun = time.perf_counter()
        (written,) = minigpt.generation.complete(gpt2, tokenizer, [text], **settings)
        seconds = time.perf_counter() - begun
    found = {"text": written.text, "settings": settings, "tokens_per_second": len(written.ids) / seconds}
    found |= {"drafted": written.drafted, "accepted": written.accepted} if written.drafted else {}
    print_json({"model": model, "norm": norm, "prompt": text, **found}, "-")


def _print(text: str, pieces: Iterator[str], output: TextIO) -> None:
    first = next(pieces, "")  # an error of the model comes before any output
    for piece in chain([text + first], pieces):
        print(for_terminal(piece) if output.isatty() else piece, end="", flush=True, file=output)
    print(file=output)


def _check_options(given: dict[str, Any]) -> None:
    """Check options against each other.

    Raises:
        GenerationError: if some contradict or need each other.
    """
    drawn = [options.option(name) for name in (*_shapes_a_draw(), "seed") if given[name] is not None]
    if given["greedy"] and drawn:
        raise minigpt.GenerationError(f"--greedy draws nothing, so it cannot go with {', '.join(drawn)}")
    if (given["prompts"] is None) != (given["out"] is None):
        raise minigpt.GenerationError("--prompts, a file of prompts, needs --out, a file for the texts, and vice versa")
    if given["batch_size"] is not None and given["prompts"] is None:
        raise minigpt.GenerationError("--batch-size is for --prompts")
    if given["ray"] is not None and (given["prompts"] is None or given["compiled"] or given["fit"] is not None):
        raise minigpt.GenerationError("--ray is for --prompts, without --compile or --fit")
    if given["prompts"] is not None and (given["prompt"] or given["as_json"]):
        raise minigpt.GenerationError("--prompts cannot go with a PROMPT or --json; it writes JSON lines to --out")


def _check_settings(
    settings: dict[str, Any], unasked: dict[str, Any], given: set[str], place: Path, one_text: bool
) -> None:
    """Check the settings before the weights are read.

    Raises:
        GenerationError: if some are wrong. It names those of ``given`` as the shell does; for those that come from
            the model's generation config, it names the file.
    """
    from minigpt.checkpoint import folder_of
    from minigpt.generation.settings import complaints_about, more_than_one_text

    complaints = complaints_about(settings)
    if one_text and not complaints:
        complaints = more_than_one_text(settings)
    if not complaints:
        return
    named = {name for names in complaints for name in names}
    theirs = [name for name, value in unasked.items() if name in named and settings.get(name) == value]
    said = f"; {', '.join(theirs)} from {folder_of(place) / 'generation_config.json'}" if theirs else ""
    said += "; --max-new-tokens overrides it" * ("max_length" in theirs)
    given_here = re.compile(rf"\b({'|'.join(given)})\b")
    complaint = given_here.sub(lambda name: options.option(name[0]), "; ".join(complaints.values()))
    raise minigpt.GenerationError(complaint + said)


def _settings(asked: dict[str, Any], from_file: dict[str, Any], greedy: bool) -> dict[str, Any]:
    """Return the settings: those asked for, else those of the model's generation config, else temperature 0.8."""
    shaping = _shapes_a_draw()
    settings = {"do_sample": True, "max_new_tokens": 200} | from_file
    if "max_new_tokens" in {**from_file, **asked}:
        settings.pop("max_length", None)  # as in transformers, which prefers max_new_tokens
    if greedy or asked.get("temperature", from_file.get("temperature")) == 0:  # the file's other settings shape a draw
        unshaped = {name: value for name, value in settings.items() if name not in shaping}
        return unshaped | ({"do_sample": False} if greedy else {"temperature": 0}) | asked
    if any(name in shaping for name in asked):
        settings["do_sample"] = True
    return ({"temperature": 0.8} if settings["do_sample"] else {}) | settings | asked


def _shapes_a_draw() -> list[str]:
    from minigpt.generation.processors import PROCESSORS

    return [name for name, processor in PROCESSORS.items() if processor.shapes_draw]
