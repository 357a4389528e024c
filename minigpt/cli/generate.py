"""minigpt generate: continue a prompt, or each prompt of a file."""

import re
import shlex
import sys
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minigpt.cli.options import JsonFile, OutFile, option_name, parse_draft, refuse_if
from minigpt.cli.output import PULSE, for_terminal, progress, read_standard_input, show
from minigpt.errors import CheckpointError, GenerationError
from minigpt.generation.settings import SETTINGS, GenerationSettings, check_value, is_int

if TYPE_CHECKING:
    from minigpt.generation.promptfile import TextFile
    from minigpt.model import GPT2
    from minigpt.recipe import Recipe
    from minigpt.tokenizer import Tokenizer

# Fields of a generation_config.json that are no settings, and the values that switch off a setting that we do not know.
BOOKKEEPING = re.compile(
    r"_\w+|transformers_version|(bos|decoder_start)_token_id|disable_compile|\w*assistant\w*|use_cache|prompt_lookup\w*"
)
OFF = (0, 1, "dynamic")
KNOWN_FIELDS = {*SETTINGS, "max_length"}
SHAPES_A_DRAW = [name for name, setting in SETTINGS.items() if setting.shapes_draw]


def generate(
    prompt: Annotated[list[str] | None, typer.Argument(metavar="PROMPT")] = None,
    *,
    recipe: "Recipe",
    greedy: bool = False,
    prompts: Path | None = None,
    out: OutFile = None,
    batch_size: int | None = None,
    json_file: JsonFile = None,
    **settings: Any,
) -> None:
    """Continue a prompt, or each prompt of a file.

    Args:
        prompt: Text to continue, in quotes; '-' reads it from standard input; without one, a new text.

    How tokens are chosen:
        greedy: Always the likeliest token: do_sample=False in Python.
        temperature: Divides the logits; 0 is greedy; by default 0.8.

    What is written:
        max_new_tokens: Tokens to write at most; by default 200.
        stop: End before this text; may be repeated.

    Prompts of a file:
        prompts: File of prompts: {"prompt": ...} on each line, or a plain text.
        out: File for the texts of --prompts; resumes.
        batch_size: Texts of --prompts to write at a time; by default 16.

    Examples:
        minigpt generate 'Once upon a time' --seed 1
        minigpt generate 'The dog' --model gpt2 --greedy
        minigpt generate - < prompt.txt
        minigpt generate --prompts prompts.jsonl --out texts.jsonl

        The options have the names of minigpt.generate's settings. Two defaults differ, for a reader's sake: 200 new
        tokens, drawn at temperature 0.8; in Python max_new_tokens is required and do_sample is off.
    """
    text, *others = prompt or [""]
    if others:
        quoted = shlex.join(["minigpt", "generate", " ".join([text, *others])])
        raise GenerationError(f"the prompt must be one argument, got {1 + len(others)}; quote it: {quoted}")
    given = {name: value for name, value in settings.items() if value is not None}
    if "draft" in given:
        given["draft"] = parse_draft(given["draft"])
    for name, value in given.items():  # before PyTorch is imported
        check_value(name, value)
    shaping = [option_name(name) for name in SHAPES_A_DRAW if name in given]
    refuse_if(
        (greedy and shaping, "greedy", f"draws nothing, so it cannot go with {', '.join(shaping)}"),
        (out and not prompts, "out", "is for --prompts, a file of prompts"),
        (prompts and not out, "prompts", "needs --out, a file for the texts"),
        (batch_size is not None and not prompts, "batch_size", "is for --prompts"),
        (
            prompts and (prompt or json_file),
            "prompts",
            "cannot go with a PROMPT or --json; it writes JSON lines to --out",
        ),
    )
    from minigpt.machine import settle_memory

    settle_memory()
    if prompts is not None:
        from minigpt.generation.promptfile import read_prompts

        read_prompts(prompts)  # a mistake in it is found before the model is read
    with progress() as say:
        say(f"reading {recipe.source}", 0)
        loaded = recipe.load()
    asked = _settings(given, loaded.model.generation_fields or {}, greedy)
    if text == "-":
        text = read_standard_input()
    if "max_length" in asked:  # of prompt and text together
        of_both = f"must be given, since {recipe.source} has a max_length for a prompt and its text"
        refuse_if((prompts, "max_new_tokens", of_both))
        longest = asked.pop("max_length")
        asked["max_new_tokens"] = _new_tokens_within(longest, text, loaded.tokenizer)
    try:
        valid = GenerationSettings(**asked)
        if prompts is None:
            valid.require_one_text()
    except GenerationError as error:
        if error.argument in given:
            raise
        raise GenerationError(f"{error}; it is from the generation_config.json of {recipe.source}") from error

    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise CheckpointError(f"{recipe.source} has no tokenizer")
    if prompts is not None and out is not None:
        from minigpt.generation.promptfile import TextFile

        with progress() as say:
            say(f"reading {prompts}", 0)
            places = 16 if batch_size is None else batch_size
            file = TextFile(loaded.model, tokenizer, prompts, out, recipe.fingerprint(), valid, batch_size=places)
        write_many(file)
    elif json_file is not None:
        fields = _as_json(str(recipe.source), loaded.model, tokenizer, text, valid, asked)
        show(text + fields["text"], fields, json_file)
    else:
        _show_text(loaded.model, tokenizer, text, valid)


def _show_text(model: "GPT2", tokenizer: "Tokenizer", prompt: str, settings: GenerationSettings) -> None:
    """Print the prompt, and each piece of the text when it is written."""
    from minigpt.generation.decode import stream_text

    with progress() as say:
        say("reading the prompt", 0.5)
        pieces = stream_text(model, tokenizer, prompt, settings)
        first = next(pieces, "")  # an error of the model comes before any output
    PULSE.stop()
    output = sys.stdout
    with redirect_stdout(sys.stderr):
        for piece in chain([prompt + first], pieces):
            shown = for_terminal(piece) if output.isatty() else piece
            print(shown, end="", flush=True, file=output)
        print(file=output)


def _as_json(
    source: str,
    model: "GPT2",
    tokenizer: "Tokenizer",
    prompt: str,
    settings: GenerationSettings,
    asked: dict[str, Any],
) -> dict[str, Any]:
    """Return the text with its settings and its speed as JSON; ``asked`` are the settings that JSON shows."""
    from minigpt.checkpoint.norms import described_norms
    from minigpt.generation.decode import complete_texts

    with progress() as say:
        say("writing the text", 0.5)
        begun = time.perf_counter()
        (written,) = complete_texts(model, tokenizer, [prompt], settings)
        seconds = time.perf_counter() - begun
    fields: dict[str, Any] = {"model": source, "norm": described_norms(model), "prompt": prompt}
    fields |= {"text": written.text, "settings": asked, "tokens_per_second": len(written.ids) / seconds}
    if written.drafted:
        fields |= {"draft": "int8", "drafted": written.drafted, "accepted": written.accepted}
    return fields


def _settings(given: dict[str, Any], fields: Mapping[str, Any], greedy: bool) -> dict[str, Any]:
    """Return the settings: those given, else the active fields of generation_config.json, else temperature 0.8."""
    settings: dict[str, Any] = {"do_sample": True, "max_new_tokens": 200}
    for name, value in fields.items():
        name = "stop" if name == "stop_strings" else name  # transformers' name
        is_off = value is None or (name not in KNOWN_FIELDS and value is not True and value in OFF)
        if not (is_off or BOOKKEEPING.fullmatch(name)):
            settings[name] = value
    if fields.get("max_new_tokens") is not None or "max_new_tokens" in given:
        settings.pop("max_length", None)  # as in transformers, which prefers max_new_tokens
    if greedy or given.get("temperature", settings.get("temperature")) == 0:
        for name in SHAPES_A_DRAW:  # of the file
            settings.pop(name, None)
        settings |= {"do_sample": False} if greedy else {"temperature": 0}
    elif any(name in SHAPES_A_DRAW for name in given):
        settings["do_sample"] = True
    if settings["do_sample"]:
        settings.setdefault("temperature", 0.8)
    return settings | given


def _new_tokens_within(longest: Any, prompt: str, tokenizer: "Tokenizer | None") -> int:
    """Return the new tokens that a max_length leaves after a prompt.

    Raises:
        GenerationError: if it is no number of tokens, or leaves none.
    """
    from minigpt.generation.row import prompt_ids

    if not is_int(longest):
        raise GenerationError(f"max_length in generation_config.json must be a number of tokens, got {longest!r:.200}")
    length = 0
    if tokenizer is not None:
        length = len(prompt_ids(tokenizer, prompt))
    if length >= longest:
        of_file = f"max_length in generation_config.json is {longest}"
        raise GenerationError(f"{of_file}, and the prompt has {length} tokens; give --max-new-tokens")
    return longest - length


def write_many(file: "TextFile") -> None:
    """Write the texts that a file does not have, and close it. Show how many there are, and tokens per second."""
    if file.lines.torn is not None:
        _note(f"line {file.lines.torn} of {file.lines.path} was cut short; its text is written again")
    kept = len(file.lines.rows)
    if kept:
        _note(f"{kept} texts are there already")
    started = time.perf_counter()
    tokens = 0
    texts = 0
    with file, progress() as say:
        for text in file.write():
            tokens += len(text.ids)
            texts += 1
            speed = tokens / (time.perf_counter() - started)
            say(f"{kept + texts} of {file.total} texts, {speed:.0f} tokens/s", (kept + texts) / file.total)
    spent = time.perf_counter() - started
    print(f"{texts} texts, {tokens} tokens in {spent:.1f} s, {tokens / spent:.0f} tokens/s", file=sys.stderr)


def _note(note: str) -> None:
    print(f"note: {note}", file=sys.stderr)
