"""``generate`` for tensors, ``stream`` for the text of one prompt, ``complete`` for the texts of many.

B prompts, N texts for each, T tokens of the longest prompt, V vocabulary.
"""

import dataclasses
import itertools
import logging
from collections.abc import Container, Iterator, Sequence
from typing import Literal, NamedTuple, Unpack, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from minigpt.device import require_values
from minigpt.errors import GenerationError
from minigpt.generation.batch import Batch
from minigpt.generation.drafts import drafts_for
from minigpt.generation.row import Row, TextCodec, prompt_ids, require_codec
from minigpt.generation.settings import GenerationSettings, Settings, TextSettings, parse_settings
from minigpt.inputs import check_gpt2, check_ids, check_mask
from minigpt.model import GPT2

SLIDE = 'overflow="slide" (--overflow slide in a shell) goes on beyond it'
PromptIds = Int[Tensor, "batch seq"]
Sequences = Int[Tensor, "rows total"]


class Generated(NamedTuple):
    """The result of ``generate`` with output_scores or output_logprobs.

    After the end of a row, its logprobs are 0 and its scores NaN.
    """

    sequences: Sequences
    scores: tuple[Float[Tensor, "rows vocab"], ...] | None  # the processed logits of each step
    logprobs: Float[Tensor, "rows new"]  # natural logarithm, of each new token in the distribution it was drawn from


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
        drafted, accepted: tokens that were drafted, and how many were right.
    """

    prompt: int
    number: int
    ids: list[int]
    text: str
    end: str
    logprobs: list[float] | None
    drafted: int = 0
    accepted: int = 0


# fmt: off
@overload
def generate(
    model: GPT2, input_ids: PromptIds, attention_mask: Tensor | None = None, *, tokenizer: TextCodec | None = None,
    output_scores: Literal[False] = False, output_logprobs: Literal[False] = False, **settings: Unpack[TextSettings],
) -> Sequences: ...
@overload
def generate(
    model: GPT2, input_ids: PromptIds, attention_mask: Tensor | None = None, *, tokenizer: TextCodec | None = None,
    output_scores: Literal[True], output_logprobs: bool = False, **settings: Unpack[TextSettings],
) -> Generated: ...
@overload
def generate(
    model: GPT2, input_ids: PromptIds, attention_mask: Tensor | None = None, *, tokenizer: TextCodec | None = None,
    output_scores: bool = False, output_logprobs: Literal[True], **settings: Unpack[TextSettings],
) -> Generated: ...
def generate(
    model: GPT2, input_ids: PromptIds, attention_mask: Tensor | None = None, *, tokenizer: TextCodec | None = None,
    **settings: Unpack[Settings],
) -> Sequences | Generated:
    """Return the prompts followed by the new tokens: (B * N, T + new) ids, the N texts of a prompt in successive rows.

    Args:
        input_ids: (B, T) prompts, padded on the left if their lengths differ.
        attention_mask: (B, T), 0 for padding; None if there is no padding.
        tokenizer: needed only for ``stop``.
        settings: max_new_tokens is required; ``minigpt.generation.Options`` has the others. As in transformers,
            do_sample is False by default; the command line samples at temperature 0.8 unless --greedy is given. Rows
            that have ended are filled with pad_token_id; generation ends when all rows have ended. With output_scores
            or output_logprobs, ``generate`` returns a ``Generated``.

    Ids from the config's ``used_vocab_size`` on are padding of the vocabulary and are never chosen.

    Hooks on modules see the rows that are read together. Their number and order may differ from the prompts':
    equal prompts are read once, prompts of similar length together, and finished rows leave. Hooks get inference
    tensors; clone them to use autograd.

    Raises:
        ConfigError: if the model is not a GPT2, or is on the meta device.
        GenerationError: at the call, if a setting is out of range, or a prompt is empty, padded on the right, too long
            or has an id outside the vocabulary. Later, if the logits are NaN or the settings exclude every token.
    """
    valid = GenerationSettings(**settings)
    if valid.stop:
        require_codec(tokenizer)
    prompts = _without_padding(input_ids, attention_mask)
    require_fits(model, prompts, valid)
    rows = rows_of(model, prompts, valid, tokenizer if valid.stop else None)
    for _ in write_rows(model, rows, valid, len(rows)):
        pass
    new = padded([input_ids.new_tensor(row.new_ids) for row in rows], valid.fill_id(model))  # (B * N, new)
    sequences = torch.cat([input_ids.repeat_interleave(valid.num_return_sequences, 0), new], dim=1)
    if not (valid.output_scores or valid.output_logprobs):
        return sequences
    scores = None
    if valid.output_scores:
        steps = padded([torch.stack(row.scores) for row in rows], torch.nan)  # (B * N, new, V)
        scores = steps.unbind(1)
    logprobs = padded([torch.tensor(row.logprobs, dtype=torch.float32, device=new.device) for row in rows], 0)
    return Generated(sequences, scores, logprobs)


# fmt: on
def padded(rows: list[Tensor], filler: float) -> Tensor:
    """Return tensors of several lengths as one, (rows, longest, ...), filled up at their ends."""
    return pad_sequence(rows, batch_first=True, padding_value=filler)


def stream(model: GPT2, tokenizer: TextCodec, prompt: str, **settings: Unpack[TextSettings]) -> Iterator[str]:
    """Return an iterator of pieces of the text that the model adds to ``prompt``.

    Pieces are whole characters. The text ends before a stop text; no part of a stop text is returned. An empty prompt
    starts from end-of-text, as a new document does.

    Raises:
        ConfigError, GenerationError: as ``generate``, and if the settings ask for more than one text. Arguments are
            checked at the call, before the first piece.
    """
    return stream_text(model, tokenizer, prompt, parse_settings(**settings))


def stream_text(model: GPT2, tokenizer: TextCodec, prompt: str, settings: GenerationSettings) -> Iterator[str]:
    """``stream`` with settings that are checked."""
    settings.require_one_text()
    prompts = [fitting_ids(model, tokenizer, prompt, settings)]
    rows = rows_of(model, prompts, settings, tokenizer)
    written = write_rows(model, rows, settings, 1)
    pieces = (row.take_text() for row in written)
    return filter(None, pieces)  # a token may end no character yet


def complete(
    model: GPT2, tokenizer: TextCodec, prompts: Sequence[str], *, batch_size: int = 16,
    skip: Container[tuple[int, int]] = (), output_logprobs: bool = False, **settings: Unpack[TextSettings],
) -> Iterator[Completion]:  # fmt: skip
    """Return an iterator of the texts that the model adds to many prompts, in the order in which they are finished.

    At most ``batch_size`` texts are written at a time; the next prompt takes the place of a finished text at once.
    Where the decoding kernel serves the model, a text has the same tokens as alone; elsewhere up to the last bits of
    the logits. Text j of prompt i draws with seed + i * num_return_sequences + j.

    Args:
        prompts: the texts to continue. An empty one starts a new document.
        skip: (prompt, number) of texts to leave out; you may fill it until you request the first text.
        settings: as in ``generate``.

    Raises:
        ConfigError: at the call, if the model is not a GPT2, or is on the meta device.
        GenerationError: at the call, if settings are invalid, prompts is a single text, the tokenizer is not a
            minigpt.Tokenizer, or a prompt (the message has its number) is too long. Later, as ``generate``.
    """
    valid = parse_settings(**settings, output_logprobs=output_logprobs)
    if valid.output_scores:
        raise GenerationError("is for generate; use output_logprobs here", argument="output_scores")
    return complete_texts(model, tokenizer, prompts, valid, batch_size=batch_size, skip=skip)


def complete_texts(
    model: GPT2, tokenizer: TextCodec, prompts: Sequence[str], settings: GenerationSettings, *, batch_size: int = 16,
    skip: Container[tuple[int, int]] = (), names: Sequence[str] = (),
) -> Iterator[Completion]:  # fmt: skip
    """``complete`` with settings that are checked. ``names`` name the prompts in errors."""
    if batch_size < 1:
        raise GenerationError(f"must be at least 1, got {batch_size!r}", argument="batch_size")
    require_codec(tokenizer)
    if isinstance(prompts, str):
        raise GenerationError("must be a list of texts, got str", argument="prompts")
    texts = []
    for number, prompt in enumerate(prompts):
        try:
            texts.append(fitting_ids(model, tokenizer, prompt, settings))
        except GenerationError as error:
            name = names[number] if names else f"prompt {number}"
            raise GenerationError(f"{name}: {error}") from error
    rows = rows_of(model, texts, settings, tokenizer)
    return _completions(model, rows, settings, batch_size, skip)


def _completions(
    model: GPT2, rows: list[Row], settings: GenerationSettings, places: int, skip: Container[tuple[int, int]]
) -> Iterator[Completion]:
    """Write the rows that are not to be skipped, and yield each text that is finished."""
    rows = [row for row in rows if (row.prompt, row.number) not in skip]
    if not rows:
        return
    for row in write_rows(model, rows, settings, places):
        if row.end:
            logprobs = row.logprobs if settings.output_logprobs else None
            text = row.take_text()
            yield Completion(row.prompt, row.number, row.new_ids, text, row.end, logprobs, row.drafted, row.accepted)


def fitting_ids(model: GPT2, tokenizer: TextCodec, prompt: str, settings: GenerationSettings) -> list[int]:
    """Return the ids of a prompt, after a check that it fits. One that cannot fit is refused before it is read.

    Raises:
        ConfigError, GenerationError: as ``prompt_ids`` and ``require_fits``.
    """
    check_gpt2(model)
    context = model.config.n_positions
    least_tokens = getattr(tokenizer, "least_tokens", None)
    if least_tokens is not None and isinstance(prompt, str) and settings.overflow != "slide":
        least = least_tokens(prompt)
        if least > context:
            raise GenerationError(f"the prompt has at least {least} tokens and the model's context {context}; {SLIDE}")
    ids = prompt_ids(tokenizer, prompt)
    require_fits(model, [ids], settings)
    return ids


def require_fits(model: GPT2, prompts: list[list[int]], settings: GenerationSettings) -> None:
    """Check prompts and settings against the model; log a warning if the window will slide.

    Raises:
        ConfigError: if the model is not a GPT2, or has no values.
        GenerationError: if an id is outside the vocabulary, or there is no room and overflow is not "slide".
    """
    check_gpt2(model)
    require_values(model.wte.weight.device)
    vocabulary = model.config.vocab_size
    settings.require_known_ids(vocabulary)
    wrong: set[int] = set()
    for ids in prompts:
        wrong.update(id for id in ids if not 0 <= id < vocabulary)
    if wrong:
        raise GenerationError(f"token id {min(wrong)} is outside the vocabulary of {vocabulary}")
    context = model.config.n_positions
    longest = max(map(len, prompts))
    new = settings.max_new_tokens
    if longest + new <= context:
        return
    if settings.overflow == "slide":
        text = "the text goes beyond the model's context of %d tokens; from there on it sees only the last of them"
        logging.getLogger("minigpt").warning(text, context)
        return
    if longest >= context:
        raise GenerationError(f"the prompt has {longest} tokens and the model's context {context}; {SLIDE}")
    most = f"must be at most {context - longest} with a prompt of {longest} tokens in a context of {context}"
    raise GenerationError(f"{most}, got {new}; {SLIDE}", argument="max_new_tokens")


def rows_of(
    model: GPT2, prompts: list[list[int]], settings: GenerationSettings, tokenizer: TextCodec | None = None
) -> list[Row]:
    """Return the rows to write: num_return_sequences for each prompt, each with its own seed."""
    ends = settings.end_ids(model)
    copies = settings.num_return_sequences
    rows = []
    for prompt, ids in enumerate(prompts):
        for copy in range(copies):
            seed = settings.seed
            if seed is not None:
                seed += prompt * copies + copy
            rows.append(Row(list(ids), settings, ends, tokenizer, prompt, copy, seed))
    return rows


def write_rows(model: GPT2, rows: list[Row], settings: GenerationSettings, places: int) -> Iterator[Row]:
    """Write rows, at most ``places`` at a time, and yield each row whenever it has new tokens.

    The cache is as small as possible.
    """
    # the model never reads the last new token
    longest = max(len(row.ids) for row in rows)
    columns = longest + settings.max_new_tokens - 1
    drafts = drafts_for(model, settings.draft)
    batch = Batch(model, min(places, len(rows)), columns, drafts)
    return _written(batch, rows)


def _written(batch: Batch, rows: list[Row]) -> Iterator[Row]:
    """Yield each row whenever it has new tokens. The next waiting row takes a free place at once."""
    waiting = iter(rows)
    while True:
        free = batch.places - len(batch.rows)
        batch.add(list(itertools.islice(waiting, free)))
        if not batch.rows:
            return
        yield from batch.step()


def _without_padding(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """Return the ids of each prompt.

    Raises:
        GenerationError: if a prompt is empty or padded on the right, or a tensor has another shape or dtype.
    """
    check_ids("input_ids", input_ids)
    if input_ids.numel() == 0:
        raise GenerationError("must not be empty; start from the end-of-text token", argument="input_ids")
    if attention_mask is None:
        return input_ids.tolist()
    check_mask(attention_mask, *input_ids.shape)
    mask = attention_mask.bool().to(input_ids.device)  # (B, T)
    if not mask[:, -1].all():
        raise GenerationError("must end in 1 in each row: pad on the left", argument="attention_mask")
    prompts = []
    for ids, is_real in zip(input_ids, mask, strict=True):
        prompts.append(ids[is_real].tolist())
    return prompts
