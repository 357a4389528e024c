"""From a prompt to its tokens: ``generate`` for tensors, ``stream`` for text.

B prompts, N texts for each, T tokens of the longest prompt, V vocabulary.
"""

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

from minigpt.engine import GPT2
from minigpt.errors import GenerationError
from minigpt.generation.batch import WASTE, Batch, write
from minigpt.generation.lookup import LookupBatch
from minigpt.generation.row import Row, TextCodec
from minigpt.generation.settings import GenerationSettings, parse_settings
from minigpt.generation.static import WORTH_A_GRAPH, StaticBatch, is_static
from minigpt.model.checks import check_gpt2, check_ids, check_known, check_mask
from minigpt.placement import require_values


class Generated(NamedTuple):
    """What ``generate`` returns where more than tokens is asked for.

    Where a row has ended and another goes on, its logprobs are 0, and its scores NaN: nothing was computed.
    """

    sequences: Int[Tensor, "rows total"]
    scores: tuple[Float[Tensor, "rows vocab"], ...] | None  # the processed logits of each step
    logprobs: Float[Tensor, "rows new"]  # natural logarithm, in the distribution that each new token was taken from


def generate(
    model: GPT2,
    input_ids: Int[Tensor, "batch seq"],
    attention_mask: Tensor | None = None,
    *,
    tokenizer: TextCodec | None = None,
    **settings: Any,
) -> Any:
    """The prompts and what the model adds to them: (B * N, T + new) token ids, the texts of a prompt side by side.

    Args:
        input_ids: (B, T) prompts, padded on the left where their lengths differ.
        attention_mask: (B, T), 0 for padding; None where there is none.
        tokenizer: needed for ``stop_strings`` only, to see the text.
        settings: those of ``GenerationSettings``; max_new_tokens is required. A row that has ended is filled with
            pad_token_id; generation ends when all have. With output_scores or output_logprobs, a ``Generated``.

    Ids that only fill up the vocabulary, from the config's ``used_vocab_size`` on, are never chosen.

    Hooks on blocks and their parts see whatever rows are read together, in an order of the reading's own: prompts may
    be read by length, and a row that has ended leaves. What they see cannot enter a graph of gradients but as a clone.

    Raises:
        ConfigError: the model is no GPT2, or has no values.
        GenerationError: before anything is computed: a setting is out of range, a prompt is empty or padded on the
            right, an id is outside the vocabulary, or prompt and new tokens together exceed the context. And later:
            the logits are NaN, or the settings exclude every token.
    """
    chosen = parse_settings(**settings)
    codec = _reader_of_stops(tokenizer) if chosen.stop_texts else None
    require_fits(model, input_ids, attention_mask, chosen)
    rows = rows_of(model, _without_padding(input_ids, attention_mask), chosen, codec)
    for _ in write_rows(model, rows, chosen, len(rows)):
        pass
    ids = [row.new_ids for row in rows]
    new = _padded(ids, chosen.fill_id(model.config), input_ids.dtype, input_ids.device)  # (B * N, new)
    sequences = torch.cat([input_ids.repeat_interleave(chosen.num_return_sequences, 0), new], dim=1)
    if not (chosen.output_scores or chosen.output_logprobs):
        return sequences
    logprobs = _padded([row.logprobs for row in rows], 0.0, torch.float32, new.device)  # (B * N, new)
    return Generated(sequences, _scores(rows) if chosen.output_scores else None, logprobs)


def stream(model: GPT2, tokenizer: TextCodec, prompt: str, **settings: Any) -> Iterator[str]:
    """What the model adds to ``prompt``, as pieces of text while they are decoded.

    Pieces are whole characters. A stop string ends the text before it and is never shown, not even in part. An empty
    prompt starts from end-of-text, as a new document does.

    Raises:
        ConfigError, GenerationError: as ``generate``; what can be told before anything is computed, at the call and
            not at the first piece.
    """
    chosen = parse_settings(**settings)
    require_text_alone(chosen)
    ids = prompt_ids(tokenizer, prompt)
    require_fits(model, torch.tensor([ids], device="cpu"), None, chosen)
    return _pieces(model, rows_of(model, [ids], chosen, tokenizer), chosen)


def require_text_alone(settings: GenerationSettings) -> None:
    """Refuse settings of several texts for a prompt, or of more than text, which a stream cannot hand out.

    Raises:
        GenerationError: they are.
    """
    if settings.num_return_sequences > 1:
        raise GenerationError("a stream is one text; num_return_sequences must be 1")
    if settings.output_scores or settings.output_logprobs:
        raise GenerationError("a stream hands out text alone; generate hands out output_scores and output_logprobs")


def prompt_ids(tokenizer: TextCodec, prompt: str) -> list[int]:
    """The ids of a prompt; those of an empty one are end-of-text, from which a new document starts.

    Raises:
        GenerationError: the prompt is empty and the vocabulary has no end-of-text, or the tokenizer is somebody else's.
    """
    require_codec(tokenizer)
    ids = tokenizer.encode(prompt)
    if ids:
        return ids
    end = getattr(tokenizer, "end_of_text_id", None)
    if end is None:
        raise GenerationError("the prompt is empty, and the tokenizer has no end-of-text token to start from")
    return [end]


def require_codec(tokenizer: object) -> None:
    """Refuse a tokenizer that is not like ours.

    Raises:
        GenerationError: it is another, such as transformers' own, which cannot tell the bytes of a token.
    """
    if not (hasattr(tokenizer, "encode") and hasattr(tokenizer, "decode_bytes")):
        raise GenerationError(f"the tokenizer is a {type(tokenizer).__name__}; take minigpt.Tokenizer.from_pretrained")


def rows_of(
    model: GPT2, prompts: list[list[int]], settings: GenerationSettings, tokenizer: TextCodec | None
) -> list[Row]:
    """The texts to write: for each prompt as many as num_return_sequences says, each with a seed of its own."""
    copies, ends = settings.num_return_sequences, settings.end_ids(model.config)
    return [
        Row(
            prompt, copy, list(ids), settings.max_new_tokens, settings, ends,
            None if settings.seed is None else settings.seed + prompt * copies + copy, tokenizer,
        )
        for prompt, ids in enumerate(prompts)
        for copy in range(copies)
    ]  # fmt: skip


def write_rows(model: GPT2, rows: list[Row], settings: GenerationSettings, places: int) -> Iterator[Row]:
    """The rows, each whenever it has grown, until all are over; at most ``places`` of them at a time.

    A draft is for one row: with prompt_lookup_num_tokens they are written one after another.
    """
    places = 1 if settings.draft_tokens else min(places, len(rows))
    longest = max(len(row.ids) for row in rows) + max(row.max_new_tokens for row in rows) - 1  # the last is never read
    room = min(longest, model.config.n_positions) + WASTE * (places > 1)
    return write(_batch_class(model, rows, settings)(model, settings, places, room), rows)


def _batch_class(model: GPT2, rows: list[Row], settings: GenerationSettings) -> type[Batch]:
    if settings.draft_tokens:
        return LookupBatch
    worthwhile = max(row.left for row in rows) >= WORTH_A_GRAPH
    return StaticBatch if worthwhile and is_static(model, settings) else Batch


def require_fits(model: GPT2, input_ids: Tensor, attention_mask: Tensor | None, settings: GenerationSettings) -> None:
    """Refuse what could not be finished, before any work; say where a window will slide.

    Raises:
        ConfigError: the model is no GPT2, or it or the prompt has no values.
        GenerationError: a prompt is empty, padded on the right, or no rows of ids of the vocabulary, or with its new
            tokens exceeds the context.
    """
    require_writer(model, settings)
    check_ids("input_ids", input_ids)
    for given in (input_ids, attention_mask):
        if isinstance(given, Tensor):
            require_values(given.device)
    if input_ids.numel() == 0:
        raise GenerationError("the prompt is empty; start from the end-of-text token")
    check_known(input_ids, model.config.vocab_size)
    require_room(model, _longest(input_ids, attention_mask), settings.max_new_tokens, settings.overflow)


def require_writer(model: GPT2, settings: GenerationSettings) -> None:
    """Refuse a model that cannot write, or settings that name ids it does not have.

    Raises:
        ConfigError: it is no GPT2, or has no values.
        GenerationError: an id is outside the vocabulary.
    """
    check_gpt2(model)
    require_values(model.wte.weight.device)
    settings.require_known_ids(model.config.vocab_size)


def require_room(model: GPT2, prompt: int, new: int, overflow: str) -> None:
    """Refuse more tokens than the context has room for, or where the window slides say so.

    Raises:
        GenerationError: there is no room, and nothing is to slide.
    """
    context = model.config.n_positions
    if prompt + new <= context:
        return
    if overflow == "slide":
        logging.getLogger("minigpt").warning(
            "the text goes beyond the model's context of %d tokens; from there on it sees only the last of them",
            context,
        )
        return
    if prompt >= context:
        raise GenerationError(
            f"the prompt is {prompt} tokens, and the model's context of {context} leaves no room for more "
            "unless overflow is 'slide'"
        )
    raise GenerationError(
        f"a prompt of {prompt} tokens and {new} new ones "
        f"exceed the model's context of {context}; ask for at most {context - prompt}, or let overflow be 'slide'"
    )


def _reader_of_stops(tokenizer: TextCodec | None) -> TextCodec:
    if tokenizer is None:
        raise GenerationError("stop_strings need the tokenizer as well, to see the text that is being written")
    require_codec(tokenizer)
    return tokenizer


def _longest(input_ids: Tensor, attention_mask: Tensor | None) -> int:
    """The most real tokens that a prompt has."""
    batch, seq = input_ids.shape
    if attention_mask is None:
        return seq
    check_mask(attention_mask, batch, seq)
    real = attention_mask.bool()  # (B, T)
    if not real[:, -1].all():
        raise GenerationError("a prompt ends in padding; pad on the left, so that its last token is its last column")
    return int(real.sum(-1).max())


def _without_padding(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    if attention_mask is None:
        return input_ids.tolist()
    return [ids[real].tolist() for ids, real in zip(input_ids, attention_mask.bool().to(input_ids.device), strict=True)]


def _pieces(model: GPT2, rows: list[Row], settings: GenerationSettings) -> Iterator[str]:
    for row in write_rows(model, rows, settings, 1):
        if piece := row.take_text():
            yield piece


def _padded(rows: list[list[Any]], filling: float, dtype: torch.dtype, device: torch.device) -> Num[Tensor, "rows new"]:
    """Rows of different lengths as one tensor, the shorter ones with ``filling`` behind."""
    longest = max(map(len, rows))
    return torch.tensor([row + [filling] * (longest - len(row)) for row in rows], dtype=dtype, device=device)


def _scores(rows: list[Row]) -> tuple[Float[Tensor, "rows vocab"], ...]:
    nothing = torch.full_like(rows[0].scores[0], torch.nan)
    steps = range(max(len(row.scores) for row in rows))
    return tuple(torch.stack([row.scores[i] if i < len(row.scores) else nothing for row in rows]) for i in steps)
