"""Attention of one new token a text in half precision on the CPU, at which the library's fused kernel is slow.

B batch, H heads, S tokens in all, D width of a head.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)
FEW = 2**19  # values in all, below which the fused kernel in float32 is as fast

Query = Float[Tensor, "batch heads 1 head"]
All = Float[Tensor, "batch heads total head"]


def attend(q: Query, k: All, v: All, mask: Tensor | None, scale: float) -> Query:
    """softmax(scale * q k^T + mask) v, its sums in float32, for inference.

    Where there are many values, the weights are rounded to their dtype, as the fused kernel rounds its own. Arguments
    are those of ``F.scaled_dot_product_attention``.
    """
    if v.numel() < FEW or torch.compiler.is_compiling() or type(v) is not Tensor:
        added = mask.float() if mask is not None and mask.is_floating_point() else mask
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), added, scale=scale).to(q.dtype)
    scores = q.float() * scale @ k.float().transpose(-1, -2)  # (B, H, 1, S)
    if mask is not None:  # what sees nothing averages over everything, and is never NaN
        scores = (
            scores + mask.float() if mask.is_floating_point() else scores.where(mask, torch.finfo(scores.dtype).min)
        )
    return weighted_sum(scores.softmax(dim=-1).to(v.dtype), v)


def weighted_sum(weights: Float[Tensor, "batch heads 1 total"], values: All) -> Query:
    """``weights @ values``: a bag of embeddings is just that, and the library's reads every value once, as it lies."""
    batch, heads, total, width = values.shape
    table = values.flatten(0, 1)  # (B * H, S, D)
    if table.stride(1) != width or table.stride(2) != 1 or table.stride(0) % width:
        table = table.contiguous()
    step = table.stride(0) // width
    indices, bags = _rows(batch * heads, step, total)
    table = table.as_strided(((batch * heads - 1) * step + total, width), (width, 1))  # what lies between, included
    weights = weights.flatten()  # (B * H * S)
    return F.embedding_bag(indices, table, bags, mode="sum", per_sample_weights=weights).view(batch, heads, 1, width)


@lru_cache(maxsize=1)  # every layer of a step asks for the same
def _rows(count: int, step: int, total: int) -> tuple[Int[Tensor, " rows"], Int[Tensor, " count"]]:
    """Which rows of a table belong to each of ``count`` bags, ``total`` of them every ``step``; where a bag begins."""
    firsts = torch.arange(0, count * step, step)  # (B * H)
    return (firsts[:, None] + torch.arange(total)).flatten(), torch.arange(0, count * total, total)
