"""Many prompts through one model: a fixed number of places, and the next prompt takes a free place at once."""

import dataclasses
from collections.abc import Container, Iterator, Sequence
from typing import Unpack

from minigpt.engine import GPT2
from minigpt.errors import GenerationError
from minigpt.generation.decode import rows_of, write_rows
from minigpt.generation.prompts import prompt_ids, require_codec, require_fits
from minigpt.generation.row import Row, TextCodec
from minigpt.generation.settings import GenerationSettings, TextSettings, parse_settings


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


def complete(
    model: GPT2,
    tokenizer: TextCodec,
    prompts: Sequence[str | Prompt],
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
        skip: (prompt, number) of texts to leave out; you may fill it until you request the first text.
        settings: as in ``generate``.

    Raises:
        ConfigError: at the call, if the model is not a GPT2, or is on the meta device.
        GenerationError: at the call, if settings are invalid, prompts is a single text, the tokenizer is not a
            minigpt.Tokenizer, or a prompt (the message has its number) is too long or not a text. Later, as
            ``generate``.
    """
    chosen = parse_settings(**settings, output_logprobs=output_logprobs)
    if batch_size < 1:
        raise GenerationError(f"batch_size must be 1 or more, not {batch_size!r}")
    if chosen.output_scores:
        raise GenerationError("output_scores is for generate; use output_logprobs here")
    require_codec(tokenizer)
    if not isinstance(prompts, Sequence) or isinstance(prompts, str):
        raise GenerationError(f"prompts must be a list of texts, not of type {type(prompts).__name__}")
    rows = [row for i, prompt in enumerate(prompts) for row in _rows(model, tokenizer, i, prompt, chosen)]
    return _written(model, rows, chosen, skip, batch_size)


def _written(
    model: GPT2, rows: list[Row], settings: GenerationSettings, skip: Container[tuple[int, int]], places: int
) -> Iterator[Completion]:
    wanted = [row for row in rows if (row.prompt, row.number) not in skip]
    for row in write_rows(model, wanted, settings, places) if wanted else ():
        if row.end:
            logprobs = row.logprobs if settings.output_logprobs else None
            yield Completion(
                row.prompt, row.number, row.new_ids, row.take_text(), row.end, logprobs, row.drafted, row.accepted
            )


def _rows(model: GPT2, tokenizer: TextCodec, number: int, prompt: object, settings: GenerationSettings) -> list[Row]:
    """Return the rows of one prompt."""
    given = Prompt(prompt) if isinstance(prompt, str) else prompt
    if not isinstance(given, Prompt):
        raise GenerationError(f"prompt {number} must be a text or a Prompt, not of type {type(given).__name__}")
    own = {name: getattr(given, name) for name in ("max_new_tokens", "seed") if getattr(given, name) is not None}
    try:
        chosen = settings.replace(**own) if own else settings
        ids = prompt_ids(tokenizer, given.text)
        require_fits(model, [ids], chosen)
    except GenerationError as error:
        raise GenerationError(f"{given.origin or f'prompt {number}'}: {error}") from error
    rows = rows_of(model, [ids], chosen, tokenizer, number)
    if given.seed is not None:
        for row in rows:
            row.seed = given.seed + row.number
    return rows
