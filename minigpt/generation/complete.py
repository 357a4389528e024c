"""Many prompts through one model: a fixed number of places, and the next prompt takes a free place at once."""

import dataclasses
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Unpack

import torch

from minigpt.engine import GPT2
from minigpt.errors import GenerationError, is_several
from minigpt.generation.decode import rows_of_prompt, write_rows
from minigpt.generation.prompts import prompt_ids, require_codec, require_room, require_writer
from minigpt.generation.row import Row, TextCodec
from minigpt.generation.settings import GenerationSettings, TextSettings, parse_settings
from minigpt.model.checks import check_known


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One of many prompts.

    Attributes:
        text: the text to continue; empty starts a new document.
        max_new_tokens, seed: values for this prompt instead of the settings'. The seed is that of its first text; its
            other texts use the following seeds.
        origin: the name of the prompt in error messages, instead of its number.
    """

    text: str
    max_new_tokens: int | None = None
    seed: int | None = None
    origin: str | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished text.

    Attributes:
        prompt: number of the prompt, from 0.
        number: number of the text among the prompt's num_return_sequences, from 0.
        ids: the new tokens, the end included.
        text: their text, without the end or the stop text.
        end: "eos", "stop" or "length".
        logprobs: of each new token, with output_logprobs.
        drafted, accepted: tokens that were drafted, and those of them that were right.
    """

    prompt: int
    number: int
    ids: list[int]
    text: str
    end: str
    logprobs: list[float] | None
    drafted: int = 0
    accepted: int = 0


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece of an unfinished text.

    Attributes:
        prompt, number: as in ``Completion``.
        text: the new piece; empty only if ``end`` is set.
        end: "eos", "stop" or "length" in the last piece of a text, None before.
    """

    prompt: int
    number: int
    text: str
    end: str | None


def complete(
    model: GPT2,
    tokenizer: TextCodec,
    prompts: Iterable[str | Prompt | None],
    *,
    batch_size: int = 16,
    skip: Container[tuple[int, int]] = (),
    output_logprobs: bool = False,
    **settings: Unpack[TextSettings],
) -> Iterator[Completion]:
    """Return an iterator of the texts that the model adds to many prompts, in the order in which they are finished.

    At most ``batch_size`` texts are written at a time; the next prompt takes the place of a finished text at once. A
    text has the same tokens as alone, up to the last bits of the logits. Text j of prompt i draws with
    seed + i * num_return_sequences + j.

    Args:
        prompts: a sequence is checked as a whole at the call. Any other iterable, e.g. a generator that reads a queue,
            is read lazily, when a place is free. It may yield None for "no prompt at the moment"; the unfinished texts
            then go on. An iterable that blocks stops them.
        skip: (prompt, number) of texts to leave out; you may fill it until you request the first text.
        settings: as in ``generate``.

    Raises:
        ConfigError: at the call, if the model is not a GPT2, or is on the meta device.
        GenerationError: at the call, if settings are invalid, prompts is a single text, the tokenizer is not a
            minigpt.Tokenizer, or a prompt of a sequence (the message has its number) is too long or not a text. Later,
            as ``generate``, and for the prompts of other iterables.
    """
    chosen = parse_settings(**settings, output_logprobs=output_logprobs)
    rows = _rows(model, tokenizer, prompts, chosen, batch_size)
    return (
        Completion(
            row.prompt,
            row.number,
            row.new_ids,
            row.take_text(),
            row.end,
            row.logprobs if output_logprobs else None,
            row.drafted,
            row.accepted,
        )
        for row in _write(model, rows, chosen, skip, batch_size)
        if row.end
    )


def stream_many(
    model: GPT2,
    tokenizer: TextCodec,
    prompts: Iterable[str | Prompt | None],
    *,
    batch_size: int = 16,
    **settings: Unpack[TextSettings],
) -> Iterator[Piece]:
    """Return an iterator of pieces of text as they are decoded; otherwise like ``complete``.

    Raises:
        ConfigError, GenerationError: as ``complete``.
    """
    chosen = parse_settings(**settings)
    rows = _rows(model, tokenizer, prompts, chosen, batch_size)
    return (
        Piece(row.prompt, row.number, text, row.end)
        for row in _write(model, rows, chosen, (), batch_size)
        if (text := row.take_text()) or row.end
    )


def _write(
    model: GPT2,
    rows: list[Row] | Iterator[Row | None],
    settings: GenerationSettings,
    skip: Container[tuple[int, int]],
    places: int,
) -> Iterator[Row]:
    if not isinstance(rows, list):
        wanted = (row for row in rows if row is None or (row.prompt, row.number) not in skip)
        yield from write_rows(model, wanted, settings, places)
    elif wanted := [row for row in rows if (row.prompt, row.number) not in skip]:
        yield from write_rows(model, wanted, settings, places)


def _rows(
    model: GPT2,
    tokenizer: TextCodec,
    prompts: Iterable[str | Prompt | None],
    settings: GenerationSettings,
    batch_size: int,
) -> list[Row] | Iterator[Row | None]:
    """Check the arguments; return the rows, as a list if the prompts are a sequence."""
    if not isinstance(batch_size, Integral) or batch_size < 1:
        raise GenerationError(f"batch_size must be 1 or more, not {batch_size!r}")
    if settings.output_scores:
        raise GenerationError("output_scores is for generate; use output_logprobs here")
    require_writer(model, settings)
    require_codec(tokenizer)
    if isinstance(prompts, Mapping) or not is_several(prompts):
        one = "text" if isinstance(prompts, str) else type(prompts).__name__
        raise GenerationError(f"prompts must be a list of texts, not one {one}")
    rows = _rows_of_each(model, tokenizer, prompts, settings)
    return [row for row in rows if row is not None] if isinstance(prompts, Sequence) else rows


def _rows_of_each(
    model: GPT2, tokenizer: TextCodec, prompts: Iterable[str | Prompt | None], settings: GenerationSettings
) -> Iterator[Row | None]:
    number = 0
    for prompt in prompts:
        if prompt is None:
            yield None
            continue
        given = Prompt(prompt) if isinstance(prompt, str) else prompt
        if not isinstance(given, Prompt):
            raise GenerationError(f"prompt {number} must be a text or a Prompt, not of type {type(given).__name__}")
        try:
            yield from _rows_of_one(model, tokenizer, number, given, settings)
        except GenerationError as error:
            raise GenerationError(f"{given.origin or f'prompt {number}'}: {error}") from error
        number += 1


def _rows_of_one(
    model: GPT2, tokenizer: TextCodec, number: int, prompt: Prompt, settings: GenerationSettings
) -> list[Row]:
    own = {name: getattr(prompt, name) for name in ("max_new_tokens", "seed") if getattr(prompt, name) is not None}
    chosen = settings.replace(**own) if own else settings
    ids = prompt_ids(tokenizer, prompt.text)
    check_known(torch.tensor([ids], device="cpu"), model.config.vocab_size)
    require_room(model, len(ids), chosen.max_new_tokens, settings.overflow)
    seed = chosen.seed
    if seed is not None and prompt.seed is None:
        seed += number * settings.num_return_sequences
    return rows_of_prompt(model, number, ids, chosen, tokenizer, seed)
