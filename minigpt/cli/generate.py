"""minigpt generate: continue a prompt, or each prompt of a file."""

import re
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

import minigpt
from minigpt.cli.files import for_terminal, print_json, read_standard_input, said_aside
from minigpt.cli.many import write_many
from minigpt.cli.options import Compile, Json, option

if TYPE_CHECKING:
    from minigpt.recipe import Recipe

# What a generation_config.json has beside settings, and the values that switch off a setting that we do not know.
BOOKKEEPING = re.compile(r"_\w+|transformers_version|(bos|decoder_start)_token_id|disable_compile|\w*assistant\w*")
OFF = (0, 1, "dynamic")


def generate(
    context: typer.Context,
    prompt: str = "",
    *,
    recipe: "Recipe",
    max_new_tokens: int | None = None,
    min_new_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    no_repeat_ngram_size: int | None = None,
    greedy: bool = False,
    seed: int | None = None,
    stop: list[str] | None = None,
    overflow: str | None = None,
    slide_stride: int | None = None,
    prompt_lookup_num_tokens: Annotated[int | None, typer.Option("--lookup", "--prompt-lookup-num-tokens")] = None,
    draft: str | None = None,
    prompts: Path | None = None,
    out: Path | None = None,
    batch_size: int | None = None,
    num_return_sequences: int | None = None,
    compiled: Compile = False,
    json_file: Json = None,
) -> None:
    """Continue a prompt, or each prompt of a file.

    Args:
        prompt: Text to continue; '-' reads it from standard input; without one, a new text.
        max_new_tokens: Tokens to write at most; by default 200.
        min_new_tokens: Tokens to write before the text may end.
        temperature: Divides the logits; 0 is greedy; by default 0.8.
        top_k: Draw from the k likeliest tokens only.
        top_p: Draw from the likeliest tokens that make up p, in (0, 1].
        min_p: Draw only from tokens at least p times as likely as the likeliest.
        repetition_penalty: Above 1: less of what was said before.
        no_repeat_ngram_size: Never write a run of so many tokens twice.
        greedy: Always the likeliest token: do_sample=False in Python.
        seed: Makes the draw repeatable.
        stop: End before this text; may be repeated.
        overflow: For texts beyond the context: refuse, or slide, which sees the last tokens that fit.
        slide_stride: Tokens that the window forgets at a time.
        prompt_lookup_num_tokens: Copy so many tokens of the text so far as a guess, and verify them at once.
        prompts: File of prompts, one a line or {"prompt": ...} a line; or a quoted pattern of files.
        out: File for the texts of --prompts, or folder for a pattern; resumes.
        batch_size: Texts of --prompts to write at a time; by default 16.
        num_return_sequences: Texts for each of --prompts.
        compiled: Compile the steps with torch.compile first.

    Examples:
        minigpt generate 'Once upon a time' --seed 1
        minigpt generate 'The dog' --model gpt2 --greedy
        minigpt generate - < prompt.txt
        minigpt generate --prompts prompts.jsonl --out texts.jsonl

        The options have the names of minigpt.generate's settings. Two defaults differ, for a reader's sake: 200 new
        tokens, drawn at temperature 0.8; in Python max_new_tokens is required and do_sample is off.
    """
    from minigpt.checkpoint import generation_fields
    from minigpt.device import settle_memory
    from minigpt.generation.settings import known_settings
    from minigpt.swap.saved import described_norms

    settle_memory()
    _check_options(context.params)
    place = recipe.place()  # once, so that all files come from one commit
    asked = {name: value for name in known_settings() if (value := context.params.get(name)) is not None}
    from_file = settings_in(generation_fields(place))
    settings = _settings(asked, from_file, greedy)
    _check_settings(settings, {*context.params}, from_file.keys() - asked.keys(), place, one_text=prompts is None)
    text = read_standard_input() if prompt == "-" else prompt

    output = sys.stdout
    with said_aside():
        gpt2, tokenizer = recipe.open()
        if tokenizer is None:
            raise minigpt.CheckpointError(f"{recipe.source} has no tokenizer")
        if compiled:
            minigpt.compile_steps(gpt2)
        if prompts is not None and out is not None:
            size = 16 if batch_size is None else batch_size
            write_many(gpt2, tokenizer, prompts, out, settings, size, {"recipe": recipe.fingerprint()})
            return
        if json_file is None:
            _print(text, minigpt.stream(gpt2, tokenizer, text, **settings), output)
            return
        begun = time.perf_counter()
        (written,) = minigpt.generation.complete(gpt2, tokenizer, [text], **settings)
        seconds = time.perf_counter() - begun
    found = {"text": written.text, "settings": settings, "tokens_per_second": len(written.ids) / seconds}
    found |= {"drafted": written.drafted, "accepted": written.accepted} if written.drafted else {}
    print_json({"model": str(recipe.source), "norm": described_norms(gpt2), "prompt": text, **found}, json_file)


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
    drawn = [option(name) for name in (*_shapes_a_draw(), "seed") if given[name] is not None]
    if given["greedy"] and drawn:
        raise minigpt.GenerationError(f"--greedy draws nothing, so it cannot go with {', '.join(drawn)}")
    if (given["prompts"] is None) != (given["out"] is None):
        raise minigpt.GenerationError("--prompts, a file of prompts, needs --out, a file for the texts, and vice versa")
    if given["batch_size"] is not None and given["prompts"] is None:
        raise minigpt.GenerationError("--batch-size is for --prompts")
    if given["prompts"] is not None and (given["prompt"] or given["json_file"]):
        raise minigpt.GenerationError("--prompts cannot go with a PROMPT or --json; it writes JSON lines to --out")


def settings_in(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the settings in the fields of a generation_config.json, without those that are off."""
    from minigpt.generation.settings import known_settings

    known = known_settings()
    given = {name: value for name, value in fields.items() if value is not None and not BOOKKEEPING.fullmatch(name)}
    if given.get("top_k") == 0:
        del given["top_k"]
    return {name: value for name, value in given.items() if name in known or value is True or value not in OFF}


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


def _check_settings(
    settings: dict[str, Any], options: set[str], from_file: set[str], place: Path, one_text: bool
) -> None:
    """Check the settings before the weights are read.

    Raises:
        GenerationError: if some are wrong. It names options as the shell does, and the file of those ``from_file``.
    """
    from minigpt.checkpoint import folder_of
    from minigpt.generation.settings import complaints_about

    complaints = complaints_about(settings, one_text)
    if not complaints:
        return
    message = re.sub(r"\w+", lambda word: option(word[0]) if word[0] in options - from_file else word[0],
                     "; ".join(complaints.values()))  # fmt: skip
    if theirs := sorted({name for names in complaints for name in names} & from_file & settings.keys()):
        message += f"; {', '.join(theirs)} from {folder_of(place) / 'generation_config.json'}"
    raise minigpt.GenerationError(message)


def _shapes_a_draw() -> list[str]:
    from minigpt.generation.processors import PROCESSORS

    return [name for name, processor in PROCESSORS.items() if processor.shapes_draw]
