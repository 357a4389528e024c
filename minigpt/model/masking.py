"""The keys that a query sees, and the position of each token: causality, padding and the cache in one place.

B batch, T new tokens, S tokens in all: those in the cache, then the new ones.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from minigpt.device import has_values
from minigpt.model.cache import Keys, KVCache, Queries

Real = Bool[Tensor, "batch total"]  # False for padding
Visible = Bool[Tensor, "rows 1 seq total"]


def real_tokens(attention_mask: Tensor | None, cache: KVCache | None, seq: int) -> Real | None:
    """Return True for real tokens and False for padding, over cache and input; None if every token is real.

    Without an ``attention_mask`` (B, S) the ``seq`` new tokens are all real. A cache remembers the padding it has read.
    """
    if attention_mask is not None:
        real = attention_mask.bool()
        if has_values(real) and real.all():
            return None  # kernels without a mask are faster
        return real
    if cache is None or cache.padding_mask is None:
        return None
    older = cache.padding_mask[:, : cache.length]  # the caller may have set the cache back since
    new = older.new_ones(len(older), seq)
    return torch.cat([older, new], dim=1)  # (B, S)


def positions(real: Real | None, past: int, seq: int, device: torch.device) -> Int[Tensor, "rows seq"]:
    """Return each new token's position: the number of real tokens before it in its row.

    A left-padded row starts at 0 with its first real token. Without padding, one row serves the whole batch.
    """
    if real is None:
        return torch.arange(past, past + seq, device=device)[None]  # (1, T)
    before = real.long().cumsum(-1) - 1  # (B, S)
    return before.clamp(min=0)[:, past:]  # (B, T)


def causal_mask(real: Real | None, past: int, seq: int, device: torch.device) -> Visible | None:
    """Return True where a query sees a key, or None in the two cases that need no mask.

    Those are a whole sequence without a past, which ``is_causal`` describes, and one new token that sees every key.
    """
    if real is None and (past == 0 or seq == 1):
        return None
    return visible(real, past, seq, device)


def visible(real: Real | None, past: int, seq: int, device: torch.device) -> Visible:
    """Return True where a query sees a key: the key is not in its future, and is not padding."""
    query = torch.arange(past, past + seq, device=device)[:, None]  # (T, 1)
    key = torch.arange(past + seq, device=device)  # (S,)
    causal = (key <= query)[None, None]  # (1, 1, T, S)
    if real is None:
        return causal
    return causal & real[:, None, None]  # (B, 1, T, S)


def packed_mask(position_ids: Int[Tensor, "rows seq"]) -> Bool[Tensor, "rows 1 seq seq"] | None:
    """Return True where a query sees a key of its own text, or None if each row is one text.

    Where positions do not go up by one, another text begins.
    """
    before = position_ids[:, :1] - 1
    begins = position_ids.diff(prepend=before) != 1  # (B, T)
    text = begins.cumsum(-1)  # the number of each token's text in its row
    if has_values(text) and not text.any():
        return None
    is_same = text[:, :, None] == text[:, None]  # (B, T, T)
    causal = visible(None, 0, text.shape[1], text.device)
    return is_same[:, None] & causal  # (B, 1, T, T)


def additive_mask(mask: Tensor | None, q: Queries, k: Keys) -> Float[Tensor, "rows 1 seq total"]:
    """Return what eager attention adds to its scores: 0 where a query sees a key, else the lowest finite number.

    That number is finite, so a padded query, which sees nothing, averages over every key and is never NaN. The dtype is
    the model's, as in the reference, also where the scores are wider. A mask of numbers is returned as it is.
    """
    if mask is None:
        seq, total = q.shape[2], k.shape[2]
        mask = visible(None, total - seq, seq, q.device)
    if mask.is_floating_point():
        return mask
    dtype = q.dtype
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.float32
    nothing = torch.zeros(mask.shape, dtype=dtype, device=q.device)
    lowest = torch.finfo(dtype).min
    return nothing.masked_fill(~mask, lowest)
