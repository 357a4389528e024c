"""Who may look at whom, and which position each token has: one place for causality, padding and the cache.

B batch, T new tokens, S tokens in all: those in the cache and then the new ones.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from minigpt.errors import GenerationError
from minigpt.placement import has_values


def padding_mask(
    given: Tensor | None, remembered: Bool[Tensor, "batch older"] | None, batch: int, past: int, seq: int
) -> Bool[Tensor, "batch total"] | None:
    """True for real tokens, False for padding, over cache and input; None where every token is real.

    Args:
        given: the caller's mask over all S tokens, or None: then the new tokens are all real.
        remembered: what the cache knows of the past.

    Raises:
        GenerationError: ``given`` is no tensor (B, S), or holds something else than 0 and 1.
    """
    if given is not None:
        if not isinstance(given, Tensor):
            raise GenerationError(f"attention_mask must be a tensor (batch, seq), not of type {type(given).__name__}")
        if given.shape != (batch, past + seq):
            raise GenerationError(
                f"attention_mask is {tuple(given.shape)}, but must cover {batch} rows of {past + seq} tokens"
                + f", the {past} in the cache included" * (past > 0)
            )
        real = given.bool()
        if not has_values(given):
            return real
        if not torch.equal(real.to(given.dtype), given):
            raise GenerationError("attention_mask must hold 1 for real tokens and 0 for padding, and nothing else")
        return None if real.all() else real  # where nothing is padded, the kernels that need no mask serve
    if remembered is None:
        return None
    older = remembered[:, :past]  # the cache may have been set back since
    return torch.cat([older, older.new_ones(batch, seq)], dim=1)  # (B, S)


def positions(
    padding: Bool[Tensor, "batch total"] | None, past: int, seq: int, device: torch.device
) -> Int[Tensor, "rows seq"]:
    """Position of each new token: how many real tokens of its row stand before it.

    So a left-padded row starts at 0 with its first real token. What the padding itself computes is finite and unseen.
    One row serves the whole batch where nothing is padded.
    """
    if padding is None:
        return torch.arange(past, past + seq, device=device)[None]  # (1, T)
    return (padding.long().cumsum(-1) - 1).clamp(min=0)[:, past:]  # (B, T)


def visible(
    padding: Bool[Tensor, "batch total"] | None, past: int, seq: int, device: torch.device
) -> Bool[Tensor, "rows 1 seq total"]:
    """True where a query may see a key: the key is not in its future, and is not padding."""
    query = torch.arange(past, past + seq, device=device)[:, None]  # (T, 1)
    key = torch.arange(past + seq, device=device)  # (S,)
    causal = (key <= query)[None, None]  # (1, 1, T, S)
    return causal if padding is None else causal & padding[:, None, None]  # (B, 1, T, S)


def sdpa_mask(
    padding: Bool[Tensor, "batch total"] | None, past: int, seq: int, device: torch.device
) -> Bool[Tensor, "rows 1 seq total"] | None:
    """What the fused kernel takes: ``visible``, or None in the two cases that it knows by itself.

    Those are a whole sequence looking back at itself, and a single new token that sees everything.
    """
    if padding is None and (past == 0 or seq == 1):
        return None
    return visible(padding, past, seq, device)


def eager_mask(
    padding: Bool[Tensor, "batch total"] | None, past: int, seq: int, device: torch.device, dtype: torch.dtype
) -> Float[Tensor, "rows 1 seq total"]:
    """What the written-out formula adds to its scores: 0 for what is ``visible``, the lowest finite number otherwise.

    Finite, and not -inf, so that a padded query, which sees nothing, averages over everything and is never NaN.
    """
    return additive_mask(visible(padding, past, seq, device), dtype)


def added_mask(
    mask: Bool[Tensor, "rows 1 seq total"] | None, scores: Float[Tensor, "batch heads seq total"]
) -> Float[Tensor, "rows 1 seq total"]:
    """What the written-out formula adds to these scores, from what ``sdpa_mask`` made for the fused kernel."""
    if mask is not None:
        return additive_mask(mask, scores.dtype)
    seq, total = scores.shape[-2:]
    return eager_mask(None, total - seq, seq, scores.device, scores.dtype)


def packed_mask(position_ids: Int[Tensor, "rows seq"]) -> Bool[Tensor, "rows 1 seq seq"] | None:
    """True where a query may see a key of its own text, where a row has several, one after the other.

    A text begins wherever a position is not the one after the last. None where no row has a second one, as far as that
    can be looked at.
    """
    text = (position_ids.diff(prepend=position_ids[..., :1] - 1) != 1).cumsum(-1)  # (rows, T), its number in the row
    if has_values(text) and not text[..., -1].any():
        return None
    seen = visible(None, 0, text.shape[-1], text.device)  # (1, 1, T, T)
    return seen & (text[..., None, :, None] == text[..., None, None, :])


def additive_mask(
    visible: Bool[Tensor, "*dims"], dtype: torch.dtype, hidden: float | None = None
) -> Float[Tensor, "*dims"]:
    """What is added to scores: 0 where visible, ``hidden`` where not, by default the lowest finite number."""
    hidden = torch.finfo(dtype).min if hidden is None else hidden
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, hidden)
