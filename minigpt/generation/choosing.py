"""Choose the next tokens of rows by their logits and settings.

B rows, V vocabulary.
"""

from collections import defaultdict

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minigpt.engine import GPT2
from minigpt.errors import GenerationError
from minigpt.generation.processors import Situation, warp_by
from minigpt.generation.row import Row

NOT_A_NUMBER = "the model's logits are NaN; its weights, its norms or its dtype cannot compute this prompt"
INFINITE = "a logit is infinite, so no token can be drawn; use a wider dtype or a higher temperature"
NO_TOKEN_LEFT = "the settings exclude every token; allow some, or ask for fewer tokens"
BLOCK = 256  # scores whose maximum is computed at once


def next_logits(model: GPT2, logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
    """Return logits in float32, with -inf for ids that are padding of the vocabulary."""
    used = model.config.used_vocab_size
    if used is None:
        return logits.float()
    unused = torch.arange(logits.shape[-1], device=logits.device) >= used  # (V,)
    return logits.float().masked_fill(unused, -torch.inf)


def next_tokens(logits: Float[Tensor, "batch vocab"], rows: list[Row], *, keeps: bool = True) -> list[int]:
    """Return the next token of each row: the likeliest, or one drawn with the row's own random number.

    Rows whose settings choose in the same way are processed together. With ``keeps``, scores and log-probabilities are
    added to the rows whose settings ask for them.

    Raises:
        GenerationError: if a logit is NaN, or infinite where a token is drawn, or if no token is left to choose.
    """
    alike: defaultdict[str, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        alike[row.choice].append(place)
    found = {}
    for places in alike.values():
        own = logits if len(places) == len(rows) else logits[places]
        found |= zip(places, _next_tokens_alike(own, [rows[place] for place in places], keeps), strict=True)
    return [found[place] for place in range(len(rows))]


def _next_tokens_alike(logits: Float[Tensor, "batch vocab"], rows: list[Row], keeps: bool) -> list[int]:
    settings, largest = rows[0].settings, logits.amax(-1)  # (B,)
    if largest.isnan().any():  # NaN is larger than any number
        raise GenerationError(NOT_A_NUMBER)
    scores = _scores(logits, rows)  # (B, V)
    if scores is not logits:
        largest = scores.amax(-1)
    if settings.changes_logits and (largest == -torch.inf).any():
        raise GenerationError(NO_TOKEN_LEFT)
    if settings.samples:
        if largest.isinf().any():
            raise GenerationError(INFINITE)
        chances = torch.cat([row.chances(1) for row in rows])  # (B,)
        tokens = drawn(scores, chances.to(scores.device)).tolist()
    else:
        tokens = likeliest(scores).tolist()
    if keeps and (settings.output_scores or settings.output_logprobs):
        logprobs = scores.log_softmax(-1)  # (B, V)
        for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            row.logprobs.append(float(logprobs[i, token]))
            if settings.output_scores:
                row.scores.append(scores[i])
    return tokens


def likeliest(scores: Float[Tensor, "batch vocab"]) -> Int[Tensor, " batch"]:
    """Return ``scores.argmax(-1)``: the token with the largest score of each row, the first of several.

    On the CPU ``argmax`` is slower than ``amax``. So ``amax`` finds the block with the largest score, and ``argmax``
    searches that block.
    """
    vocab = scores.shape[-1]
    if not scores.is_cpu or vocab < BLOCK:
        return scores.argmax(-1)
    blocks, last = scores.unfold(-1, BLOCK, BLOCK), scores[:, -BLOCK:]  # (B, V // BLOCK, BLOCK) and (B, BLOCK)
    largest = torch.cat((blocks.amax(-1), last.amax(-1, keepdim=True)), dim=-1)  # (B, V // BLOCK + 1)
    first = (largest.argmax(-1) * BLOCK).clamp_(max=vocab - BLOCK)  # (B,)
    return first + scores.gather(-1, first[:, None] + torch.arange(BLOCK, device=scores.device)).argmax(-1)


def drawn(scores: Float[Tensor, "batch vocab"], chances: Float[Tensor, " batch"]) -> Int[Tensor, " batch"]:
    """Return a token for each row, drawn by inverting the cumulative distribution at the row's random number."""
    ends = scores.softmax(-1).cumsum(-1, dtype=torch.float64)  # (B, V)
    found = torch.searchsorted(ends, chances[:, None] * ends[:, -1:], right=True)[:, 0]  # (B,)
    return found.clamp_(max=scores.shape[-1] - 1)  # NaN gives an id in range too


def _scores(logits: Tensor, rows: list[Row]) -> Tensor:
    settings = rows[0].settings
    if not settings.depends_on_row:
        return warp_by(logits, Situation(settings, torch.empty(0, 0), 0, rows[0].end_ids))
    situations = [
        Situation(settings, torch.tensor([row.ids], device=logits.device), row.prompt_length, row.end_ids)
        for row in rows
    ]
    return torch.cat([warp_by(own, at) for own, at in zip(logits.split(1), situations, strict=True)])
