"""Which keys a query sees, and which position each token has: causality, padding and the cache in one place.

B batch, T new tokens, S tokens in all: those in the cache, then the new ones.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from minigpt.device import has_values
from minigpt.model.cache import KVCache


def real_tokens(attention_mask: Tensor | None, cache: KVCache | None, seq: int) -> Bool[Tensor, "batch total"] | None:
    """Return True for real tokens and False for padding, over cache and input; None if every token is real.

    Args:
        attention_mask: (B, S), or None if the ``seq`` new tokens are all real.
        cache: remembers the padding it has read.
    """
    if attention_mask is not None:
        real = attention_mask.bool()
        return None if has_values(real) and real.all() else real  # kernels without a mask are faster
    if cache is None or cache.padding_mask is None:
        return None
    older = cache.padding_mask[:, : cache.length]  # the caller may have set the cache back since
    return torch.cat([older, older.new_ones(len(older), seq)], dim=1)  # (B, S)


def positions(
    real: Bool[Tensor, "batch total"] | None, past: int, seq: int, device: torch.device
) -> Int[Tensor, "rows seq"]:
    """Return each new token's position: the number of real tokens before it in its row.

    A left-padded row starts at 0 with its first real token. Without padding, one row serves the whole batch.
    """
    if real is None:
        return torch.arange(past, past + seq, device=device)[None]  # (1, T)
    return (real.long().cumsum(-1) - 1).clamp(min=0)[:, past:]  # (B, T)


def causal_mask(
    real: Bool[Tensor, "batch total"] | None, past: int, seq: int, device: torch.device
) -> Bool[Tensor, "rows 1 seq total"] | None:
    """Return True where a query sees a key, or None in the two cases that need no mask.

    Those are a whole sequence without a past, which ``is_causal`` describes, and one new token that sees every key.
    """
    if real is None and (past == 0 or seq == 1):
        return None
    return visible(real, past, seq, device)


def visible(
    real: Bool[Tensor, "batch total"] | None, past: int, seq: int, device: torch.device
) -> Bool[Tensor, "rows 1 seq total"]:
    """Return True where a query sees a key: the key is not in its future, and is not padding."""
    query = torch.arange(past, past + seq, device=device)[:, None]  # (T, 1)
    key = torch.arange(past + seq, device=device)  # (S,)
    causal = (key <= query)[None, None]  # (1, 1, T, S)
    return causal if real is None else causal & real[:, None, None]  # (B, 1, T, S)


def packed_mask(position_ids: Int[Tensor, "rows seq"]) -> Bool[Tensor, "rows 1 seq seq"] | None:
    """Return True where a query sees a key of its own text, or None if each row is one text.

    Where positions do not go up by one, another text begins.
    """
    begins = position_ids.diff(prepend=position_ids[:, :1] - 1) != 1  # (B, T)
    text = begins.cumsum(-1)
    if has_values(text) and not text.any():
        return None
    is_same = (text[:, :, None] == text[:, None])[:, None]  # (B, 1, T, T)
    return is_same & visible(None, 0, text.shape[1], text.device)


def additive_mask(
    mask: Tensor | None, q: Float[Tensor, "batch heads seq head"], k: Float[Tensor, "batch heads total head"]
) -> Float[Tensor, "rows 1 seq total"]:
    """Return what eager attention adds to its scores: 0 where a query sees a key, else the lowest finite number.

    That number is finite, so a padded query, which sees nothing, averages over every key and is never NaN. The dtype is
    the model's, as in the reference, also where the scores are wider. A mask of numbers is returned as it is.
    """
    if mask is None:
        seq, total = q.shape[2], k.shape[2]
        mask = visible(None, total - seq, seq, q.device)
    if mask.is_floating_point():
        return mask
    dtype = torch.float32 if torch.is_autocast_enabled(q.device.type) else q.dtype
    return torch.zeros(mask.shape, dtype=dtype, device=q.device).masked_fill(~mask, torch.finfo(dtype).min)


def left_padded(
    texts: Sequence[Sequence[int]], device: torch.device | str | None = None
) -> tuple[Int[Tensor, "batch seq"], Int[Tensor, "batch seq"]]:
    """Return token ids (B, T), padded on the left, and their attention mask (B, T): 0 for padding."""
    longest = max(map(len, texts))
    starts = [longest - len(text) for text in texts]
    ids = torch.tensor([[0] * start + list(text) for start, text in zip(starts, texts, strict=True)], device=device)
    mask = torch.arange(longest, device=device) >= torch.tensor(starts, device=device)[:, None]
    return ids, mask.long()
