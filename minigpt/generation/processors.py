"""Logits -> logits, one small function each, in transformers' order and to its very values.

B batch, T tokens so far, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple, SupportsIndex

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from minigpt.errors import GenerationError
from minigpt.generation.settings import GenerationSettings, parse_settings
from minigpt.model.checks import check_ids, check_known

Logits = Float[Tensor, "batch vocab"]
Ids = Int[Tensor, "batch seq"]


class Situation(NamedTuple):
    """What a processor may know besides the logits."""

    settings: GenerationSettings
    ids: Tensor  # (B, T) the text so far
    prompt_length: int
    end_ids: tuple[int, ...]


def warp(
    logits: Logits,
    input_ids: Int[Tensor, "batch seq"] | None = None,
    *,
    prompt_length: int | None = None,
    **settings: Any,
) -> Logits:
    """The logits to draw from, after every processor that the settings name; excluded tokens are -inf.

    Args:
        logits: (B, V) of the next token.
        input_ids: (B, T) the tokens so far, without padding; needed by the settings that look back.
        prompt_length: how many of them are the prompt, which min_new_tokens does not count; by default all.
        settings: as ``generate`` takes them. Those that shape a draw are applied unless do_sample is off. Without an
            eos_token_id there is none for min_new_tokens to hold back.

    Raises:
        GenerationError: a setting is unknown, out of range or in contradiction, or needs input_ids; or one of the
            tensors is of another shape or dtype, or says of tokens what the logits do not know.
    """
    least = settings.get("min_new_tokens")
    enough = max(1, int(least)) if isinstance(least, Integral) else 1
    chosen = parse_settings(**{"max_new_tokens": enough, "do_sample": True, **settings})
    if not isinstance(logits, Tensor):
        raise GenerationError(f"logits must be a tensor (batch, vocab), not of type {type(logits).__name__}")
    if logits.ndim != 2 or not logits.shape[1] or not logits.is_floating_point():
        raise GenerationError(f"logits must be numbers (batch, vocab), not {logits.dtype} of {tuple(logits.shape)}")
    chosen.require_known_ids(logits.shape[-1])
    if input_ids is None:
        if chosen.depends_on_row:
            raise GenerationError("these settings look back at the text; give input_ids as well")
        input_ids = torch.empty(len(logits), 0, dtype=torch.long, device=logits.device)
    check_ids("input_ids", input_ids)
    if len(input_ids) != len(logits):
        raise GenerationError(f"there are {len(logits)} rows of logits and {len(input_ids)} of input_ids")
    if input_ids.numel() and chosen.depends_on_row:
        check_known(input_ids, logits.shape[-1])
    length = input_ids.shape[1]
    prompt_length = length if prompt_length is None else prompt_length
    if not isinstance(prompt_length, SupportsIndex) or not 0 <= prompt_length <= length:
        raise GenerationError(f"prompt_length must be within the {length} tokens of input_ids, not {prompt_length!r}")
    return warp_by(logits, Situation(chosen, input_ids, prompt_length, chosen.given_end_ids))


def warp_by(logits: Logits, situation: Situation) -> Logits:
    """``warp`` for settings that are already checked."""
    for name, process in PROCESSORS.items():
        if (value := situation.settings.active(name)) is not None:
            logits = process(logits, value, situation)
    return logits


def penalize_repetition(logits: Logits, ids: Ids, penalty: float) -> Logits:
    """Tokens of the text made less likely, whatever the sign of their logits (Keskar et al. 2019, arXiv 1909.05858)."""
    said = logits.gather(1, ids)  # (B, T)
    return logits.scatter(1, ids, torch.where(said < 0, said * penalty, said / penalty))


def penalize_count(logits: Logits, added: Ids, penalty: float) -> Logits:
    """Logits less ``penalty`` for each time that their token has been added."""
    return logits.scatter_add(1, added, torch.full_like(added, -penalty, dtype=logits.dtype))


def penalize_presence(logits: Logits, added: Ids, penalty: float) -> Logits:
    """Logits less ``penalty`` where their token has been added, however often."""
    return logits.scatter(1, added, logits.gather(1, added) - penalty)


def add_bias(logits: Logits, bias: Mapping[int, float]) -> Logits:
    """Logits with numbers added to some ids'."""
    ids = torch.tensor(list(bias), device=logits.device)
    return logits.index_add(1, ids, torch.tensor([*bias.values()]).to(logits).expand(len(logits), -1))


def forbid_repeated_ngrams(logits: Logits, ids: Ids, size: int) -> Logits:
    """No token that would complete a run of ``size`` tokens which is in the text already (arXiv 1705.04304)."""
    if ids.shape[1] < size:
        return logits
    runs = ids.unfold(1, size, 1)  # (B, T - size + 1, size)
    begun = ids[:, ids.shape[1] - size + 1 :]  # (B, size - 1)
    again = (runs[..., :-1] == begun[:, None]).all(-1)  # (B, T - size + 1)
    row, place = again.nonzero(as_tuple=True)
    banned = torch.zeros_like(logits, dtype=torch.bool)
    banned[row, runs[row, place, -1]] = True
    return logits.masked_fill(banned, -torch.inf)


def forbid_runs(logits: Logits, ids: Ids, runs: Sequence[Sequence[int]], end_ids: Sequence[int]) -> Logits:
    """No token that would complete one of the ``runs``; one that is an end alone stays allowed."""
    banned = torch.zeros_like(logits, dtype=torch.bool)
    for *begun, last in runs:
        if begun:
            if len(begun) <= ids.shape[1]:
                banned[:, last] |= (ids[:, -len(begun) :] == ids.new_tensor(begun)).all(-1)
        elif last not in end_ids:
            banned[:, last] = True
    return logits.masked_fill(banned, -torch.inf)


def forbid(logits: Logits, tokens: Sequence[int]) -> Logits:
    """None of ``tokens``."""
    return logits.masked_fill(_members(tokens, logits), -torch.inf)


def keep_top_k(logits: Logits, k: int) -> Logits:
    """The k highest logits and those equal to the lowest of them (Fan et al. 2018, arXiv 1805.04833)."""
    lowest_kept = logits.topk(min(k, logits.shape[-1])).values[..., -1:]  # (B, 1)
    return logits.masked_fill(logits < lowest_kept, -torch.inf)


def keep_top_p(logits: Logits, p: float) -> Logits:
    """The fewest likeliest tokens whose probabilities reach p (nucleus; Holtzman et al. 2019, arXiv 1904.09751)."""
    ascending, order = logits.sort()  # both (B, V)
    in_the_tail = ascending.softmax(-1).cumsum(-1) <= 1 - p
    in_the_tail[..., -1].fill_(False)
    return logits.masked_fill(in_the_tail.scatter(1, order, in_the_tail), -torch.inf)


def keep_min_p(logits: Logits, p: float) -> Logits:
    """Tokens at least p times as likely as the likeliest (Nguyen et al. 2024, arXiv 2407.01082)."""
    probabilities = logits.softmax(-1)  # (B, V)
    unlikely = probabilities < p * probabilities.amax(-1, keepdim=True)
    return logits.masked_fill(unlikely.scatter(-1, probabilities.topk(1).indices, False), -torch.inf)


def keep_typical(logits: Logits, p: float) -> Logits:
    """Tokens of the least unexpected surprise that reach p together (Meister et al. 2022, arXiv 2202.00666)."""
    log_probabilities = logits.log_softmax(-1)  # (B, V)
    entropy = -(log_probabilities * log_probabilities.exp()).nansum(-1, keepdim=True)  # (B, 1)
    strangeness, order = (-log_probabilities - entropy).abs().sort()  # both (B, V)
    reached = logits.gather(-1, order).softmax(-1).cumsum(-1)
    last = (reached < p).sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)  # (B, 1)
    too_strange = strangeness > strangeness.gather(-1, last)
    too_strange[..., 0].fill_(False)
    return logits.masked_fill(too_strange.scatter(-1, order, too_strange), -torch.inf)


def _members(tokens: Sequence[int], logits: Logits) -> Bool[Tensor, " vocab"]:
    mask = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    mask[[token for token in tokens if 0 <= token < len(mask)]] = True
    return mask


def _hold_back_ends(logits: Logits, least: int, at: Situation) -> Logits:
    return forbid(logits, at.end_ids) if at.ids.shape[1] - at.prompt_length < least else logits


# What each setting does to logits, given its value. In transformers' order, with OpenAI's three where vLLM has them.
PROCESSORS: dict[str, Callable[[Tensor, Any, Situation], Tensor]] = {
    "logit_bias": lambda logits, bias, at: add_bias(logits, bias),
    "repetition_penalty": lambda logits, penalty, at: penalize_repetition(logits, at.ids, float(penalty)),
    "frequency_penalty": lambda logits, penalty, at: penalize_count(logits, at.ids[:, at.prompt_length :], penalty),
    "presence_penalty": lambda logits, penalty, at: penalize_presence(logits, at.ids[:, at.prompt_length :], penalty),
    "no_repeat_ngram_size": lambda logits, size, at: forbid_repeated_ngrams(logits, at.ids, size),
    "bad_words_ids": lambda logits, runs, at: forbid_runs(logits, at.ids, runs, at.end_ids),
    "min_new_tokens": _hold_back_ends,
    "suppress_tokens": lambda logits, tokens, at: forbid(logits, tokens),
    "temperature": lambda logits, temperature, at: logits / float(temperature),
    "top_k": lambda logits, k, at: keep_top_k(logits, k),
    "top_p": lambda logits, p, at: keep_top_p(logits, float(p)),
    "min_p": lambda logits, p, at: keep_min_p(logits, float(p)),
    "typical_p": lambda logits, p, at: keep_typical(logits, float(p)),
}
