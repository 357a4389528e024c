"""Attention against the formula written head by head, and its two implementations against each other."""

from typing import Any

import pytest
import torch
from helpers import SMALL, assert_close, assert_same_bits, random_ids, randomize, small_model
from torch import Tensor

from minigpt import GPT2Config
from minigpt.model.attention import CausalSelfAttention
from minigpt.model.masking import causal_mask

HEADS = [(48, 4), (48, 1), (12, 12), (1, 1), (30, 3)]


def random_attention(attention: str, layer: int = 0, **fields: Any) -> CausalSelfAttention:
    module = CausalSelfAttention(GPT2Config(**SMALL | fields), layer, attention).eval().double()
    randomize(module)
    return module


def attend(module: CausalSelfAttention, x: Tensor, padding: Tensor | None = None) -> Tensor:
    """The module with a causal mask."""
    return module(x, causal_mask(padding, 0, x.shape[1], x.device))


def head_by_head(module: CausalSelfAttention, x: Tensor, scale: float) -> Tensor:
    """Arithmetic of Vaswani et al. 2017, section 3.2.1, one query of one head at a time."""
    width = x.shape[-1] // module.n_head
    qkv = x @ module.c_attn.weight + module.c_attn.bias  # (B, T, 3C): all queries, then all keys, then all values
    q, k, v = qkv.chunk(3, dim=-1)
    y = torch.zeros_like(x)
    for head in range(module.n_head):
        part = slice(head * width, (head + 1) * width)
        for row in range(x.shape[0]):
            for t in range(x.shape[1]):
                scores = k[row, : t + 1, part] @ q[row, t, part] * scale  # (t + 1,)
                y[row, t, part] = torch.softmax(scores, dim=0) @ v[row, : t + 1, part]
    return y @ module.c_proj.weight + module.c_proj.bias


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("n_embd", "n_head"), HEADS)
@torch.no_grad()
def test_is_the_formula_head_by_head(n_embd: int, n_head: int, attention: str) -> None:
    module = random_attention(attention, n_embd=n_embd, n_head=n_head)
    x = torch.randn(2, 6, n_embd, dtype=torch.float64)
    assert_close(attend(module, x), head_by_head(module, x, (n_embd / n_head) ** -0.5), 1e-13, f"{n_head} heads")


@torch.no_grad()
def test_upcast_scores_do_not_overflow_float16() -> None:
    fields = {"reorder_and_upcast_attn": True, "scale_attn_weights": False}
    module = random_attention("eager", **fields).half()
    module.c_attn.bias[:96] = 100.0  # products of 12 * 100 * 100, beyond float16's 65,504
    x = torch.randn(1, 5, 48).half()
    assert attend(module, x).isfinite().all()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_no_token_sees_a_later_one(attention: str, device: torch.device) -> None:
    model = small_model(attention=attention, device=device)
    ids = random_ids(2, 12, device=device)
    logits = model(ids)
    for t in (1, 5, 11):
        other = ids.clone()
        other[:, t:] = (other[:, t:] + 1) % 83
        assert_same_bits(model(other)[:, :t], logits[:, :t], f"tokens before {t}")
        assert (model(other)[:, t:] - logits[:, t:]).abs().amax(-1).min() > 1e-3, "and every later one does"
