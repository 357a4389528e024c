"""Causal self-attention: the half of a block in which tokens read one another.

B batch, T new tokens, S tokens in all, C embedding, H heads, D = C / H width of a head.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from minigpt.config import GPT2Config
from minigpt.model.cache import Keys, LayerCache, Queries
from minigpt.model.masking import additive_mask
from minigpt.model.mlp import Conv1D, Stream


class CausalSelfAttention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, arXiv 1706.03762, section 3.2)."""

    def __init__(self, config: GPT2Config, layer: int, attention: str) -> None:
        super().__init__()
        self.layer = layer
        self.n_head = config.n_head
        self.scale = 1.0
        if config.scale_attn_weights:
            self.scale = config.head_size**-0.5  # 1 / sqrt(D)
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= layer + 1
        self.attention = attention
        self.upcast = config.reorder_and_upcast_attn
        self.c_attn = Conv1D(config.n_embd, 3 * config.n_embd)
        self.c_proj = Conv1D(config.n_embd, config.n_embd)
        self.attn_dropout = nn.Dropout(config.attn_pdrop)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, x: Stream, mask: Tensor | None = None, cache: LayerCache | None = None) -> Stream:
        """Return what each token gathers from the tokens it sees. ``mask`` is what ``causal_mask`` returns."""
        qkv = self.c_attn(x)  # (B, T, 3C)
        y = self.mix(qkv, mask, cache)  # (B, T, C)
        return self.resid_dropout(self.c_proj(y))

    def mix(self, qkv: Float[Tensor, "batch seq qkv"], mask: Tensor | None, cache: LayerCache | None) -> Stream:
        """Return the attention's output before its projection, from queries, keys and values side by side."""
        batch, seq, _ = qkv.shape
        qkv = qkv.view(batch, seq, 3, self.n_head, -1)  # (B, T, 3, H, D)
        qkv = qkv.permute(2, 0, 3, 1, 4)  # (3, B, H, T, D)
        q, k, v = qkv.unbind()
        if cache is not None:
            k, v = cache.update(self.layer, qkv[1:])  # each (B, H, S, D)
        k, v = self.laid_out(k), self.laid_out(v)
        attend = self.eager
        if self.attention == "sdpa":
            attend = self.sdpa
        y = attend(q, k, v, mask)  # (B, H, T, D)
        y = y.transpose(1, 2).reshape(batch, seq, -1)  # (B, T, C)
        return y.contiguous()

    def laid_out(self, keys: Keys) -> Keys:
        """Return keys or values as the reference has them in memory: the bits of a product depend on it."""
        return keys.contiguous()

    def sdpa(self, q: Queries, k: Keys, v: Keys, mask: Tensor | None) -> Queries:
        """PyTorch's fused kernel. Its scores are float32 or wider, as ``reorder_and_upcast_attn`` asks."""
        dropout = 0.0
        if self.training:
            dropout = self.attn_dropout.p
        is_causal = False
        if mask is None and q.shape[2] > 1:  # a single query sees every key; a branch, which a compiler does not trace
            is_causal = True
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=is_causal, scale=self.scale)

    def eager(self, q: Queries, k: Keys, v: Keys, mask: Tensor | None) -> Queries:
        """softmax(scale * q k^T + mask) v (arXiv 1706.03762, equation 1)."""
        scores = self.scores(q, k) + additive_mask(mask, q, k)  # (B, H, T, S)
        # A low score plus float16's lowest number is -inf. A padded query, which sees only such keys, would be NaN.
        scores = scores.clamp(min=torch.finfo(scores.dtype).min)
        weights = scores.softmax(dim=-1).to(v.dtype)
        return self.attn_dropout(weights) @ v  # (B, H, T, D)

    def scores(self, q: Queries, k: Keys) -> Float[Tensor, "batch heads seq total"]:
        """Return scale * q k^T, in float32 or wider if ``reorder_and_upcast_attn`` asks for it."""
        if not self.upcast or q.dtype == torch.float64:
            return q @ k.transpose(-1, -2) * self.scale
        # Scaled inside the product, so that float16 cannot overflow (Megatron-LM).
        with torch.autocast(q.device.type, enabled=False):
            q = q.float().flatten(0, 1)  # (B * H, T, D)
            k = k.float().mT.flatten(0, 1)  # (B * H, D, S)
            scores = torch.baddbmm(q.new_empty(()), q, k, beta=0, alpha=self.scale)  # (B * H, T, S)
        return scores.unflatten(0, (-1, self.n_head))
