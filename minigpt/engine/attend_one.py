"""Attention of one new token a row, where PyTorch's fused kernel is slow: in half precision on the CPU, and compiled.

B batch, H heads, S tokens in all, D width of a head.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from minigpt.engine.product import only_infers
from minigpt.processor import HALVES

Query = Float[Tensor, "batch heads 1 head"]
All = Float[Tensor, "batch heads total head"]


def suits(q: Tensor) -> bool:
    """Return True if ``attend`` is faster than the fused kernel, for inference."""
    if q.shape[2] != 1 or not (q.is_cpu or q.is_cuda):
        return False
    return (torch.compiler.is_compiling() or (q.is_cpu and q.dtype in HALVES)) and only_infers(q)


def attend(q: Query, k: All, v: All, mask: Tensor | None, scale: float) -> Query:
    """Return softmax(scale * q k^T + mask) v with sums in float32, as ``F.scaled_dot_product_attention`` is called."""
    if torch.compiler.is_compiling():
        return written_out(q, k, v, mask, scale)
    added = mask.float() if mask is not None and mask.is_floating_point() else mask
    return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), added, scale=scale).to(q.dtype)


def written_out(q: Query, k: All, v: All, mask: Tensor | None, scale: float) -> Query:
    """The same as sums of products: a compiler makes loops of them that read keys and values once, in place."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) * scale * k.to(wide)).sum(-1)[:, :, None]  # (B, H, 1, S)
    weights = masked(scores, mask).softmax(dim=-1)
    return (weights.transpose(-1, -2) * v.to(wide)).sum(-2, keepdim=True).to(q.dtype)


def masked(scores: Float[Tensor, "batch heads 1 total"], mask: Tensor | None) -> Float[Tensor, "batch heads 1 total"]:
    """Return the scores with hidden keys at the lowest finite number, so that a row with all keys hidden is not NaN."""
    if mask is None:
        return scores
    lowest = torch.finfo(scores.dtype).min
    if mask.is_floating_point():
        return (scores + mask.to(scores.dtype)).clamp(min=lowest)
    return scores.where(mask, lowest)
