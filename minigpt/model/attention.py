"""Causal self-attention: the half of a block in which tokens look at one another.

B batch, T new tokens, S tokens in all, C embedding, H heads, D = C / H width of a head.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from minigpt.config import GPT2Config
from minigpt.engine import one_launch, one_query
from minigpt.engine.ragged import Ragged
from minigpt.model.cache import LayerCache
from minigpt.model.conv1d import Conv1D
from minigpt.model.masking import added_mask

ATTENTIONS = ("sdpa", "eager")

Heads = Float[Tensor, "batch heads seq head"]
AllHeads = Float[Tensor, "batch heads total head"]


class CausalSelfAttention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, arXiv 1706.03762, section 3.2).

    ``attention`` is "sdpa", the library's fused kernel, or "eager", the formula written out.
    """

    def __init__(self, config: GPT2Config, layer: int, attention: str, arithmetic: str = "fast") -> None:
        super().__init__()
        self.layer = layer
        self.n_head = config.n_head
        self.scale = score_scale(config, layer)
        self.attention = attention
        self.fast = arithmetic == "fast"
        self.upcast = config.reorder_and_upcast_attn
        self.c_attn = Conv1D(config.n_embd, 3 * config.n_embd, arithmetic)
        self.c_proj = Conv1D(config.n_embd, config.n_embd, arithmetic)
        self.attn_dropout = nn.Dropout(config.attn_pdrop)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def forward(
        self,
        x: Float[Tensor, "batch seq embd"],
        mask: Float[Tensor, "rows 1 seq total"] | Bool[Tensor, "rows 1 seq total"] | None,
        cache: LayerCache | Ragged | None = None,
    ) -> Float[Tensor, "batch seq embd"]:
        """``mask`` is what ``masking.sdpa_mask`` or ``masking.eager_mask`` makes for this kind of attention.

        Where several texts stand one after the other in ``x``, ``Ragged`` brings the mask and cache of each.
        """
        qkv = self.c_attn(x)  # (B, T, 3C)
        y = self.c_proj(cache.mix_each(self.mix, qkv) if isinstance(cache, Ragged) else self.mix(qkv, mask, cache))
        return self.resid_dropout(y) if self.training else y

    def mix(
        self, qkv: Float[Tensor, "batch seq qkv"], mask: Tensor | None, cache: LayerCache | None
    ) -> Float[Tensor, "batch seq embd"]:
        """What every token takes from those before it: all between the two projections."""
        batch, seq, _ = qkv.shape
        qkv = qkv.contiguous()  # a product of weights by rows may leave vectors in pieces, which no kernel takes
        if self.may_fuse and self.attention == "sdpa" and mask is not None and one_launch.suits(cache, qkv):
            return one_launch.attend(qkv, cache.layers[self.layer], mask, cache.column, self.scale)
        qkv = qkv.view(batch, seq, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)  # (B, T, 3C) -> (3, B, H, T, D)
        q, k, v = qkv.unbind()
        if cache is not None:
            k, v = cache.update(self.layer, qkv[1:])  # each (B, H, S, D)
        if not self.fast:  # as the reference's own cache leaves them: a product's last bits may depend on it
            k, v = k.contiguous(), v.contiguous()
        attend = self.sdpa if self.attention == "sdpa" else self.eager
        y = attend(q, k, v, mask).transpose(1, 2).reshape(batch, seq, -1)  # (B, H, T, D) -> (B, T, C)
        return y.contiguous()  # which one text with heads of one column is not, and then its products' bits are others

    @property
    def may_fuse(self) -> bool:
        """Whether kernels of our own may stand for the library's: in fast arithmetic, and where nothing is dropped."""
        return self.fast and not self.training

    def sdpa(self, q: Heads, k: AllHeads, v: AllHeads, mask: Tensor | None) -> Heads:
        """The fused kernel. It keeps scores in float32 or wider, which is all that ``reorder_and_upcast_attn`` asks."""
        if self.may_fuse and one_query.suits(q):
            return one_query.attend(q, k, v, mask, self.scale)
        dropout = self.attn_dropout.p if self.training else 0.0
        # Without a mask, a single query sees every key. Written out, since a compiler would pass the comparison on.
        is_causal = True if mask is None and q.shape[2] > 1 else False  # noqa: SIM210
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=is_causal, scale=self.scale)

    def eager(self, q: Heads, k: AllHeads, v: AllHeads, mask: Tensor | None) -> Heads:
        """softmax(scale * q k^T + mask) v (arXiv 1706.03762, equation 1)."""
        scores = (
            self.upcast_scores(q, k)
            if self.upcast and q.dtype != torch.float64
            else q @ k.transpose(-1, -2) * self.scale
        )  # (B, H, T, S)
        if mask is None or mask.dtype == torch.bool:  # made for the fused kernel, where this layer alone was changed
            mask = added_mask(mask, scores)
        # A low score plus float16's lowest number is -inf, and a padded query that sees only those would be NaN.
        scores = (scores + mask).clamp(min=torch.finfo(scores.dtype).min)
        weights = scores.softmax(dim=-1).to(v.dtype)
        return self.attn_dropout(weights) @ v  # (B, H, T, D)

    def upcast_scores(self, q: Heads, k: AllHeads) -> Float[Tensor, "batch heads seq total"]:
        """scale * q k^T in float32, scaled inside the product so that half precision cannot overflow (Megatron-LM)."""
        with torch.autocast(q.device.type, enabled=False):
            q, k = q.float().flatten(0, 1), k.float().mT.flatten(0, 1)  # (B * H, T, D), (B * H, D, S)
            scores = torch.baddbmm(q.new_empty(()), q, k, beta=0, alpha=self.scale)  # (B * H, T, S)
        return scores.unflatten(0, (-1, self.n_head))


def score_scale(config: GPT2Config, layer: int) -> float:
    """What scores are multiplied by: 1 / sqrt(D), divided by the layer's number too where the config asks."""
    scale = config.head_size**-0.5 if config.scale_attn_weights else 1.0
    return scale / (layer + 1) if config.scale_attn_by_inverse_layer_idx else scale
