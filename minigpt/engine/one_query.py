"""Attention of one new token a text, at which the library's fused kernel is slow: on the CPU, and beside a compiler.

B batch, H heads, S tokens in all, D width of a head.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from minigpt.engine.product import only_infers
from minigpt.processor import HALVES

FEW = 2**19  # values in all, below which the fused kernel in float32 is as fast

Query = Float[Tensor, "batch heads 1 head"]
All = Float[Tensor, "batch heads total head"]


def suits(q: Tensor) -> bool:
    """Whether ``attend`` is the faster one: on the CPU in half precision, and for a compiler. It is for inference."""
    if q.shape[2] != 1 or not (q.is_cpu or q.is_cuda):
        return False
    is_wanted = torch.compiler.is_compiling() or (q.is_cpu and q.dtype in HALVES)
    return is_wanted and only_infers(q)


def attend(q: Query, k: All, v: All, mask: Tensor | None, scale: float) -> Query:
    """softmax(scale * q k^T + mask) v, its sums in float32; arguments as of ``F.scaled_dot_product_attention``."""
    if torch.compiler.is_compiling():
        return written_out(q, k, v, mask, scale)
    if v.numel() < FEW or type(v) is not Tensor:
        added = mask.float() if mask is not None and mask.is_floating_point() else mask
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), added, scale=scale).to(q.dtype)
    scores = masked(q.float() * scale @ k.float().transpose(-1, -2), mask)  # (B, H, 1, S)
    return weighted_sum(scores.softmax(dim=-1).to(v.dtype), v)  # each weight is good to half an epsilon of v's dtype


def written_out(q: Query, k: All, v: All, mask: Tensor | None, scale: float) -> Query:
    """The same as sums of products, of which a compiler makes loops that read keys and values once, as they lie."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) * scale * k.to(wide)).sum(-1)[:, :, None]  # (B, H, 1, S)
    weights = masked(scores, mask).softmax(dim=-1)
    return (weights.transpose(-1, -2) * v.to(wide)).sum(-2, keepdim=True).to(q.dtype)


def masked(scores: Float[Tensor, "batch heads 1 total"], mask: Tensor | None) -> Float[Tensor, "batch heads 1 total"]:
    """Scores with what is hidden so low that it weighs nothing; finite, so that where all is hidden nothing is NaN."""
    if mask is None:
        return scores
    lowest = torch.finfo(scores.dtype).min
    if mask.is_floating_point():
        return (scores + mask.to(scores.dtype)).clamp(min=lowest)
    return scores.where(mask, lowest)


def weighted_sum(weights: Float[Tensor, "batch heads 1 total"], values: All) -> Query:
    """``weights @ values``: a bag of embeddings is just that, and the library's reads every value once, as it lies."""
    batch, heads, total, width = values.shape
    table = values.flatten(0, 1)  # (B * H, S, D)
    if table.stride(1) != width or table.stride(2) != 1 or table.stride(0) % width or not table.stride(0):
        table = table.contiguous()
    step = table.stride(0) // width
    indices, bags = _rows(batch * heads, step, total, values.device)
    if type(indices) is not Tensor:  # made under a mode, with whose tensors nobody else can do anything
        _rows.cache_clear()
    table = table.as_strided(((batch * heads - 1) * step + total, width), (width, 1))  # what lies between, included
    weights = weights.flatten()  # (B * H * S)
    return F.embedding_bag(indices, table, bags, mode="sum", per_sample_weights=weights).view(batch, heads, 1, width)


@lru_cache(maxsize=1)  # every layer of a step asks for the same
def _rows(
    count: int, step: int, total: int, device: torch.device
) -> tuple[Int[Tensor, " rows"], Int[Tensor, " count"]]:
    """Which rows of a table belong to each of ``count`` bags, ``total`` of them every ``step``; where a bag begins."""
    bags = torch.arange(count, device=device)  # (B * H)
    return (bags[:, None] * step + torch.arange(total, device=device)).flatten(), bags * total
