"""``warp``: the logits processors as a public function."""

from numbers import Integral
from typing import SupportsIndex, Unpack

import torch
from jaxtyping import Int
from torch import Tensor

from minigpt.errors import GenerationError
from minigpt.generation.processors import Logits, Situation, warp_by
from minigpt.generation.settings import Options, parse_settings
from minigpt.model.checks import check_ids, check_known


def warp(
    logits: Logits,
    input_ids: Int[Tensor, "batch seq"] | None = None,
    *,
    prompt_length: int | None = None,
    **settings: Unpack[Options],
) -> Logits:
    """Apply every processor that the settings name, and return the logits to draw from; excluded tokens are -inf.

    Args:
        logits: (B, V) of the next token.
        input_ids: (B, T) the tokens so far, without padding; needed by the settings that look back at the text.
        prompt_length: number of tokens of the prompt, which min_new_tokens does not count; by default all.
        settings: as in ``generate``. Those that shape a draw apply unless do_sample is False. min_new_tokens has no
            effect without eos_token_id.

    Raises:
        GenerationError: if a setting is unknown, out of range, contradicts another or needs input_ids, or if a tensor
            has the wrong shape, dtype or ids.
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
