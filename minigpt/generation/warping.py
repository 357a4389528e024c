"""``warp``: the logits processors as a public function."""

import sys
from typing import Unpack

import torch
from jaxtyping import Int
from torch import Tensor

from minigpt.errors import GenerationError
from minigpt.generation.processors import Logits, Situation, warp_by
from minigpt.generation.settings import FROM_CONFIG, Options, parse_settings
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
    chosen = parse_settings(**{"max_new_tokens": sys.maxsize, "do_sample": True, **settings})
    if not isinstance(logits, Tensor) or logits.ndim != 2 or not logits.is_floating_point():
        raise GenerationError("logits must be a tensor (batch, vocab) of floating point")
    chosen.require_known_ids(logits.shape[-1])
    if input_ids is None:
        if chosen.depends_on_row:
            raise GenerationError("these settings look back at the text; give input_ids as well")
        input_ids = torch.empty(len(logits), 0, dtype=torch.long, device=logits.device)
    check_ids("input_ids", input_ids)
    length = input_ids.shape[1]
    if len(input_ids) != len(logits):
        raise GenerationError(f"there are {len(logits)} rows of logits and {len(input_ids)} of input_ids")
    if length and chosen.depends_on_row:
        check_known(input_ids, logits.shape[-1])
    prompt_length = length if prompt_length is None else prompt_length
    if not 0 <= prompt_length <= length:
        raise GenerationError(f"prompt_length must be within the {length} tokens of input_ids, not {prompt_length}")
    ends = () if chosen.eos_token_id is FROM_CONFIG else chosen.eos_token_id
    return warp_by(logits, Situation(chosen, input_ids, prompt_length, ends))
