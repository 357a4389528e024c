"""From logits to tokens: ``warp``, which applies the processors, and the choice of the next token of each row.

B rows, T tokens so far, V vocabulary.
"""

import math
import sys
from typing import Any, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minigpt.errors import GenerationError
from minigpt.generation.processors import Logits, TextSoFar
from minigpt.generation.row import Row
from minigpt.generation.settings import FROM_CONFIG, GenerationSettings, Options, parse_settings
from minigpt.inputs import check_ids, check_known
from minigpt.model import GPT2

CHUNK = 256  # scores whose maximum is computed at once


class NoTokenLeftError(GenerationError):
    """The settings of a row exclude every token."""


def warp(
    logits: Logits,
    input_ids: Int[Tensor, "batch seq"] | None = None,
    *,
    prompt_length: int | None = None,
    **settings: Unpack[Options],
) -> Logits:
    """Apply every processor that the settings name, and return the logits to draw from; excluded tokens are -inf.

    Args:
        logits: (B, V) of the next token, in a floating dtype.
        input_ids: (B, T) the tokens so far, without padding; needed by the settings that look back at the text.
        prompt_length: number of tokens of the prompt, which min_new_tokens does not count; by default all.
        settings: as in ``generate``. Those that shape a draw apply unless do_sample is False. min_new_tokens has no
            effect without eos_token_id.

    Raises:
        GenerationError: if a setting is unknown, out of range, contradicts another or needs input_ids, or if a tensor
            has the wrong shape, dtype or ids.
    """
    defaults: dict[str, Any] = {"max_new_tokens": sys.maxsize, "do_sample": True}
    valid = parse_settings(**defaults | settings)
    if not isinstance(logits, Tensor) or logits.ndim != 2 or not logits.is_floating_point():
        raise GenerationError("must be a tensor (batch, vocab) of floating point", argument="logits")
    valid.require_known_ids(logits.shape[-1])
    if input_ids is None:
        if valid.looks_back:
            raise GenerationError("must be given, since these settings look back at the text", argument="input_ids")
        input_ids = torch.empty(len(logits), 0, dtype=torch.long, device=logits.device)
    check_ids("input_ids", input_ids)
    length = input_ids.shape[1]
    if len(input_ids) != len(logits):
        raise GenerationError(f"must have {len(logits)} rows, as logits, got {len(input_ids)}", argument="input_ids")
    if length and valid.looks_back:
        check_known(input_ids, logits.shape[-1])
    if prompt_length is None:
        prompt_length = length
    if not 0 <= prompt_length <= length:
        raise GenerationError(f"must be within [0, {length}], got {prompt_length}", argument="prompt_length")
    ends = () if valid.eos_token_id is FROM_CONFIG else valid.eos_token_id
    return _processed(logits, valid, TextSoFar(input_ids.long(), prompt_length, ends))


def next_tokens(model: GPT2, logits: Float[Tensor, "batch vocab"], rows: list[Row], *, keeps: bool = True) -> list[int]:
    """Return the next token of each row: the likeliest, or one drawn with the row's own random number.

    Ids that are padding of the vocabulary have no token. Rows whose settings choose in the same way are processed
    together. With ``keeps``, scores and log-probabilities are added to the rows whose settings ask for them.

    Raises:
        NoTokenLeftError: if the settings of a row exclude every token.
        GenerationError: if a logit is NaN or infinite.
    """
    logits = logits.float()
    used = model.config.used_vocab_size
    if used is not None:
        is_padding = torch.arange(logits.shape[-1], device=logits.device) >= used
        logits = logits.masked_fill(is_padding, -torch.inf)
    alike: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        alike.setdefault(row.settings.choice, []).append(place)
    if len(alike) == 1:
        return _next_tokens_alike(logits, rows, keeps)
    tokens = [0] * len(rows)
    for places in alike.values():
        rows_alike = [rows[place] for place in places]
        tokens_alike = _next_tokens_alike(logits[places], rows_alike, keeps)
        for place, token in zip(places, tokens_alike, strict=True):
            tokens[place] = token
    return tokens


def _next_tokens_alike(logits: Float[Tensor, "batch vocab"], rows: list[Row], keeps: bool) -> list[int]:
    settings = rows[0].settings
    scores = _scores(logits, rows)  # (B, V)
    if settings.samples:
        largest = scores.amax(-1)  # (B,)
        chances = torch.cat([row.chances(1) for row in rows])  # (B,)
        tokens = drawn(scores, chances.to(scores.device)).tolist()
    else:
        largest, ids = likeliest(scores)
        tokens = ids.tolist()
    before = []
    if scores is not logits:
        before = logits.amax(-1).tolist()
    _check(settings, largest.tolist(), before)
    if keeps and (settings.output_scores or settings.output_logprobs):
        _keep(scores, rows, tokens)
    return tokens


def _keep(scores: Float[Tensor, "batch vocab"], rows: list[Row], tokens: list[int]) -> None:
    """Add the log-probability of its token to each row, and its scores if the settings ask for them."""
    logprobs = scores.log_softmax(-1)  # (B, V)
    for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        row.logprobs.append(float(logprobs[i, token]))
        if row.settings.output_scores:
            row.scores.append(scores[i])


def _check(settings: GenerationSettings, largest: list[float], before: list[float]) -> None:
    """Raise an error if a row has no token: by its largest score, and its largest logit before it was processed."""
    if any(map(math.isnan, largest + before)):  # NaN is larger than any number
        raise GenerationError(
            "the model's logits are NaN; its weights, its norms or its dtype cannot compute this prompt"
        )
    if settings.changes_logits and -math.inf in largest:
        raise NoTokenLeftError("the settings exclude every token; allow some, or ask for fewer tokens")
    if any(map(math.isinf, largest)):
        raise GenerationError("a logit is infinite, so no token can be chosen; use a wider dtype, or mend the model")


def likeliest(scores: Float[Tensor, "batch vocab"]) -> tuple[Float[Tensor, " batch"], Int[Tensor, " batch"]]:
    """Return ``scores.max(-1)``: the largest score of each row and its token, the first of several.

    On the CPU ``max`` is slower than ``amax``. So ``amax`` finds the block with the largest score, and ``argmax``
    searches that block.
    """
    vocab = scores.shape[-1]
    if not scores.is_cpu or vocab < CHUNK:
        return scores.amax(-1), scores.argmax(-1)
    blocks = scores.unfold(-1, CHUNK, CHUNK)  # (B, V // CHUNK, CHUNK)
    last = scores[:, -CHUNK:]  # (B, CHUNK)
    maxima = torch.cat((blocks.amax(-1), last.amax(-1, keepdim=True)), dim=-1)
    largest, block = maxima.max(-1)  # each (B)
    first = (block * CHUNK).clamp_(max=vocab - CHUNK)  # (B,)
    places = first[:, None] + torch.arange(CHUNK, device=scores.device)  # (B, CHUNK)
    return largest, first + scores.gather(-1, places).argmax(-1)


def drawn(scores: Float[Tensor, "batch vocab"], chances: Float[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """Return a token for each row, drawn by inverting the cumulative distribution at the row's random number."""
    ends = scores.softmax(-1).cumsum(-1, dtype=torch.float64)  # (B, V)
    heights = chances[:, None] * ends[:, -1:]  # (B, 1)
    tokens = torch.searchsorted(ends, heights, right=True)[:, 0]  # (B,)
    return tokens.clamp_(max=scores.shape[-1] - 1)  # NaN gives an id in range too


def _scores(logits: Tensor, rows: list[Row]) -> Tensor:
    settings = rows[0].settings
    if not settings.processes:
        return logits
    if not settings.looks_back:
        nothing = torch.empty(len(rows), 0, dtype=torch.long, device=logits.device)
        return _processed(logits, settings, TextSoFar(nothing, 0, rows[0].end_ids))
    scores = []
    for alone, row in zip(logits.split(1), rows, strict=True):  # alone: (1, V)
        text = TextSoFar(row.ids_on(logits.device), row.prompt_length, row.end_ids)
        scores.append(_processed(alone, settings, text))
    return torch.cat(scores)


def _processed(logits: Logits, settings: GenerationSettings, text: TextSoFar) -> Logits:
    for process in settings.processes:
        logits = process(logits, text)
    return logits
