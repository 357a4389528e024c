"""``generate`` for tensors, ``stream`` for text.

B prompts, N texts for each, T tokens of the longest prompt, V vocabulary.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple, Unpack, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from minigpt.engine import GPT2
from minigpt.errors import GenerationError
from minigpt.generation.batch import WASTE, Batch, write
from minigpt.generation.prompts import prompt_ids, require_codec, require_fits, without_padding
from minigpt.generation.row import Row, TextCodec
from minigpt.generation.settings import ONE_TEXT, GenerationSettings, Settings, TextSettings, parse_settings
from minigpt.generation.static import WORTH_A_GRAPH, StaticBatch, graph_holds, is_static

Sequences = Int[Tensor, "rows total"]


class Generated(NamedTuple):
    """The result of ``generate`` with output_scores or output_logprobs.

    After the end of a row, its logprobs are 0 and its scores NaN.
    """

    sequences: Sequences
    scores: tuple[Float[Tensor, "rows vocab"], ...] | None  # the processed logits of each step
    logprobs: Float[Tensor, "rows new"]  # natural logarithm, of each new token in the distribution it was drawn from


@overload
def generate(
    model: GPT2,
    input_ids: Int[Tensor, "batch seq"],
    attention_mask: Tensor | None = None,
    *,
    tokenizer: TextCodec | None = None,
    output_scores: Literal[False] = False,
    output_logprobs: Literal[False] = False,
    **settings: Unpack[TextSettings],
) -> Sequences: ...
@overload
def generate(
    model: GPT2,
    input_ids: Int[Tensor, "batch seq"],
    attention_mask: Tensor | None = None,
    *,
    tokenizer: TextCodec | None = None,
    output_scores: Literal[True],
    output_logprobs: bool = False,
    **settings: Unpack[TextSettings],
) -> Generated: ...
@overload
def generate(
    model: GPT2,
    input_ids: Int[Tensor, "batch seq"],
    attention_mask: Tensor | None = None,
    *,
    tokenizer: TextCodec | None = None,
    output_scores: bool = False,
    output_logprobs: Literal[True],
    **settings: Unpack[TextSettings],
) -> Generated: ...
def generate(
    model: GPT2,
    input_ids: Int[Tensor, "batch seq"],
    attention_mask: Tensor | None = None,
    *,
    tokenizer: TextCodec | None = None,
    **settings: Unpack[Settings],
) -> Sequences | Generated:
    """Return the prompts followed by the new tokens: (B * N, T + new) ids, the N texts of a prompt in successive rows.

    Args:
        input_ids: (B, T) prompts, padded on the left if their lengths differ.
        attention_mask: (B, T), 0 for padding; None if there is no padding.
        tokenizer: needed only for ``stop``.
        settings: max_new_tokens is required; ``minigpt.generation.Options`` describes the others. As in transformers,
            do_sample is False by default; the command line samples at temperature 0.8 unless --greedy is given. Rows
            that have ended are filled with pad_token_id; generation ends when all rows have ended. With output_scores
            or output_logprobs, ``generate`` returns a ``Generated``.

    Ids from the config's ``used_vocab_size`` on are padding of the vocabulary and are never chosen.

    Hooks on modules see the rows that are read together. Their order may differ from that of the prompts: prompts are
    grouped by length, and finished rows leave. Hooks get inference tensors; clone them to use autograd.

    Raises:
        ConfigError: if the model is not a GPT2, or is on the meta device.
        GenerationError: at the call, if a setting is out of range, or a prompt is empty, padded on the right, too long
            or has an id outside the vocabulary. Later, if the logits are NaN or the settings exclude every token.
    """
    chosen = GenerationSettings(**settings)
    if chosen.stop:
        require_codec(tokenizer)
    prompts = without_padding(input_ids, attention_mask)
    require_fits(model, prompts, chosen)
    rows = rows_of(model, prompts, chosen, tokenizer if chosen.stop else None)
    for _ in write_rows(model, rows, chosen, len(rows)):
        pass
    like = {"dtype": input_ids.dtype, "device": input_ids.device}
    new = _padded([torch.tensor(row.new_ids, **like) for row in rows], chosen.fill_id(model.config))  # (B * N, new)
    sequences = torch.cat([input_ids.repeat_interleave(chosen.num_return_sequences, 0), new], dim=1)
    if not (chosen.output_scores or chosen.output_logprobs):
        return sequences
    scores = _padded([torch.stack(row.scores) for row in rows], torch.nan) if chosen.output_scores else None
    logprobs = _padded([torch.tensor(row.logprobs, dtype=torch.float32, device=new.device) for row in rows], 0)
    return Generated(sequences, None if scores is None else scores.unbind(1), logprobs)


def stream(model: GPT2, tokenizer: TextCodec, prompt: str, **settings: Unpack[TextSettings]) -> Iterator[str]:
    """Return an iterator of pieces of the text that the model adds to ``prompt``.

    Pieces are whole characters. The text ends before a stop text; no part of a stop text is returned. An empty prompt
    starts from end-of-text, as a new document does.

    Raises:
        ConfigError, GenerationError: as ``generate``, and if the settings ask for more than one text. Arguments are
            checked at the call, before the first piece.
    """
    chosen = parse_settings(**settings)
    if chosen.num_return_sequences > 1:
        raise GenerationError(ONE_TEXT)
    prompts = [prompt_ids(tokenizer, prompt)]
    require_fits(model, prompts, chosen)
    rows = rows_of(model, prompts, chosen, tokenizer)
    return (piece for row in write_rows(model, rows, chosen, 1) if (piece := row.take_text()))


def rows_of(
    model: GPT2,
    prompts: list[list[int]],
    settings: GenerationSettings,
    tokenizer: TextCodec | None = None,
    first: int = 0,
) -> list[Row]:
    """Return the rows to write: num_return_sequences for each prompt, each with its own seed.

    ``first`` is the number of the first prompt.
    """
    ends, copies, rows = settings.end_ids(model.config), settings.num_return_sequences, []
    for prompt, ids in enumerate(prompts, first):
        for copy in range(copies):
            seed = None if settings.seed is None else settings.seed + prompt * copies + copy
            rows.append(Row(list(ids), settings, ends, tokenizer, prompt, copy, seed))
    return rows


def write_rows(model: GPT2, rows: list[Row], settings: GenerationSettings, places: int) -> Iterator[Row]:
    """Write rows, at most ``places`` at a time, and yield each row whenever it has new tokens.

    The cache is as small as possible.
    """
    places, new = min(places, len(rows)), max(row.left for row in rows)
    # the model never reads the last new token
    longest = max(len(row.ids) for row in rows) + max(row.settings.max_new_tokens for row in rows) - 1
    room = min(model.config.n_positions, longest) + WASTE * (places > 1)
    static = (
        new >= WORTH_A_GRAPH and not settings.drafts and is_static(model, settings) and graph_holds(model, places, room)
    )
    batch = (StaticBatch if static else Batch)(model, settings, places, room)
    return write(batch, rows)


def _padded(rows: list[Tensor], filling: float) -> Tensor:
    """Return rows of different lengths as one tensor (rows, longest, ...), the shorter ones filled up on the right."""
    return pad_sequence(rows, batch_first=True, padding_value=filling)
