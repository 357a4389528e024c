"""Many prompts through one model: places for some of them, and a place that is free is taken at once."""

import dataclasses
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch

from minigpt.engine import GPT2
from minigpt.errors import GenerationError, is_several
from minigpt.generation.decode import (
    prompt_ids,
    require_codec,
    require_room,
    require_writer,
    rows_of,
    write_rows,
)
from minigpt.generation.row import Row, TextCodec
from minigpt.generation.settings import GenerationSettings, parse_settings
from minigpt.model.checks import check_known


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One of many prompts.

    Attributes:
        text: what to go on from; empty starts a new document.
        max_new_tokens, seed: its own, where they are not those of the settings. A seed is that of its first text; the
            others of num_return_sequences follow it.
        origin: what an error calls it, where its number says too little.
    """

    text: str
    max_new_tokens: int | None = None
    seed: int | None = None
    origin: str | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
    """A text that is finished.

    Attributes:
        prompt: number of the prompt, from 0.
        number: which of its num_return_sequences, from 0.
        ids: the new tokens, the end included.
        text: what they say, without the end or the stop string.
        end: "eos", "stop" or "length".
        logprobs: of each new token, where output_logprobs asks for them.
    """

    prompt: int
    number: int
    ids: list[int]
    text: str
    end: str
    logprobs: list[float] | None


def complete(
    model: GPT2,
    tokenizer: TextCodec,
    prompts: Iterable[str | Prompt],
    *,
    batch_size: int = 16,
    skip: Container[tuple[int, int]] = (),
    **settings: Any,
) -> Iterator[Completion]:
    """What the model adds to each of many prompts, in the order in which they are finished.

    At most ``batch_size`` are written at a time, and what is finished leaves its place to the next at once. A row's
    tokens are those that it would get alone, up to the last bits of its logits; text j of prompt i draws with
    seed + i * num_return_sequences + j.

    Args:
        skip: (prompt, number) of texts that are not wanted; read when the first is asked for, and filled until then.
        settings: as ``generate`` takes them.

    Raises:
        ConfigError: at the call: the model is no GPT2, or has no values.
        GenerationError: at the call: settings that cannot be, one text for all prompts, somebody else's tokenizer, or
            a prompt, named by its number, that has no tokens, foreign ones or too many. And later, as ``generate``.
    """
    chosen = parse_settings(**settings)
    if not isinstance(batch_size, Integral) or batch_size < 1:
        raise GenerationError(f"batch_size must be 1 or more, not {batch_size!r}")
    if chosen.output_scores:
        raise GenerationError("scores of so many texts are not kept; output_logprobs are")
    require_writer(model, chosen)
    require_codec(tokenizer)
    if isinstance(prompts, Mapping) or not is_several(prompts):
        one = "text" if isinstance(prompts, str) else type(prompts).__name__
        raise GenerationError(f"prompts must be a list of texts, not one {one}")
    given = [Prompt(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    for number, prompt in enumerate(given):
        if not isinstance(prompt, Prompt):
            raise GenerationError(f"prompt {number} must be a text or a Prompt, not of type {type(prompt).__name__}")
    return _completions(model, _rows(model, tokenizer, given, chosen), chosen, batch_size, skip)


def _completions(
    model: GPT2, rows: list[Row], settings: GenerationSettings, places: int, skip: Container[tuple[int, int]]
) -> Iterator[Completion]:
    wanted = [row for row in rows if (row.prompt, row.number) not in skip]
    if not wanted:
        return
    for row in write_rows(model, wanted, settings, places):
        if row.end:
            logprobs = row.logprobs if settings.output_logprobs else None
            yield Completion(row.prompt, row.number, row.new_ids, row.take_text(), row.end, logprobs)


def _rows(model: GPT2, tokenizer: TextCodec, prompts: Sequence[Prompt], settings: GenerationSettings) -> list[Row]:
    texts = []
    for number, prompt in enumerate(prompts):
        try:
            texts.append(_checked_ids(model, tokenizer, prompt, settings))
        except GenerationError as error:
            raise GenerationError(f"{prompt.origin or f'prompt {number}'}: {error}") from error
    rows = rows_of(model, texts, settings, tokenizer)
    for row in rows:
        own = prompts[row.prompt]
        row.max_new_tokens = own.max_new_tokens or settings.max_new_tokens
        if own.seed is not None:
            row.seed = own.seed + row.number
    return rows


def _checked_ids(model: GPT2, tokenizer: TextCodec, prompt: Prompt, settings: GenerationSettings) -> list[int]:
    own = {name: getattr(prompt, name) for name in ("max_new_tokens", "seed") if getattr(prompt, name) is not None}
    new = dataclasses.replace(settings, **own).max_new_tokens  # which judges them
    ids = prompt_ids(tokenizer, prompt.text)
    check_known(torch.tensor([ids], device="cpu"), model.config.vocab_size)
    require_room(model, len(ids), new, settings.overflow)
    return ids
