"""A single query's attention by the quick way is the kernel's own, however keys and values lie."""

import pytest
import torch
from helpers import SMALL, assert_close, left_padding, random_ids, rms, small_model
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from minigpt import GPT2Config
from minigpt.engine import accelerate, attend_one
from minigpt.model.attention import CausalSelfAttention
from minigpt.processor import HALVES

MASKS = {
    "none": lambda visible, dtype: None,
    "bool": lambda visible, dtype: visible,
    "added": lambda visible, dtype: torch.zeros(visible.shape, dtype=dtype).masked_fill(
        ~visible, torch.finfo(dtype).min
    ),
}


def single_query(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k and v of five rows in four heads, and which of 30 keys each row sees."""
    q, k, v = (3 * torch.randn(5, 4, seq, 12).to(dtype) for seq in (1, 30, 30))
    return q, k, v, torch.rand(5, 1, 1, 30) < 0.7


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", MASKS)
@torch.inference_mode()
def test_a_single_query_in_half_precision_is_as_near_the_truth_as_the_kernels_own(
    kind: str, dtype: torch.dtype
) -> None:
    module = accelerate(CausalSelfAttention(GPT2Config(**SMALL), 0, "sdpa")).eval()
    q, k, v, visible = single_query(dtype)
    mask = MASKS[kind](visible, dtype)
    assert attend_one.suits(q)
    truth = scaled_dot_product_attention(
        q.double(), k.double(), v.double(), None if mask is None else visible, scale=module.scale
    )
    kernel = scaled_dot_product_attention(q, k, v, mask, scale=module.scale)
    given = module.sdpa(q, k, v, mask)
    assert given.dtype == dtype
    assert rms(given - truth) <= 1.05 * rms(kernel - truth)
    assert_close(given, truth.to(dtype), 2 * torch.finfo(dtype).eps, "a single query")


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", MASKS)
@torch.inference_mode()
def test_what_a_compiler_is_given_is_the_same_formula(kind: str, dtype: torch.dtype) -> None:
    q, k, v, visible = single_query(dtype)
    truth = scaled_dot_product_attention(
        q.double(), k.double(), v.double(), None if kind == "none" else visible, scale=0.3
    )
    given = attend_one.written_out(q, k, v, MASKS[kind](visible, dtype), 0.3)
    assert given.dtype == dtype
    assert_close(given, truth.to(dtype), 8 * torch.finfo(dtype).eps, "written out")


def test_it_is_for_inference_without_autocast() -> None:
    q = single_query(torch.bfloat16)[0]
    assert not attend_one.suits(q), "gradients may be asked for"
    with torch.no_grad():
        assert attend_one.suits(q)
        with torch.autocast("cpu"):
            assert not attend_one.suits(q)


@torch.inference_mode()
def test_what_is_masked_counts_nothing_and_a_query_that_sees_nothing_is_finite() -> None:
    q, k, v = (torch.randn(3, 2, seq, 8).bfloat16() for seq in (1, 10, 10))
    visible = torch.arange(10).ge(torch.tensor([0, 4, 10])[:, None])[:, None, None]  # (3, 1, 1, 10)
    for attend in (attend_one.attend, attend_one.written_out):
        given = attend(q, k, v, visible, 0.5)
        others = [x.clone() for x in (k, v)]
        others[0][1, :, :4], others[1][1, :, :4] = 1e4, -1e4
        assert torch.equal(attend(q, *others, visible, 0.5)[:2], given[:2])
        assert given.isfinite().all()


@pytest.mark.parametrize("kind", ["bool", "minus infinity"])
@torch.inference_mode()
def test_where_all_is_hidden_nothing_is_nan(kind: str) -> None:
    q, k, v, visible = single_query(torch.bfloat16)
    visible[2] = False
    mask = visible if kind == "bool" else torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
    for attend in (attend_one.attend, attend_one.written_out):
        assert attend(q, k, v, mask, 0.5).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention_dropout_acts_on_a_single_token(dtype: torch.dtype) -> None:
    model = small_model(dtype=dtype, attn_pdrop=0.5, resid_pdrop=0.0, embd_pdrop=0.0).train()
    ids = random_ids(1, 9)
    with torch.no_grad():
        cache = model.new_cache(1, 12)
        model(ids, cache=cache)
        logits = []
        for _ in range(2):
            cache.length = 9
            logits.append(model(ids[:, :1], cache=cache))
    assert not torch.equal(*logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@torch.inference_mode()
def test_padding_is_hidden_from_the_largest_scores(dtype: torch.dtype) -> None:
    model, ids, mask = small_model(dtype=dtype), random_ids(2, 10), left_padding((10, 4), 10)
    for block in model.h:
        block.attn.c_attn.weight[:, :96] *= 400  # queries and keys
    logits = []
    for _ in range(2):
        cache = model.new_cache(2, 10)
        model(ids[:, :9], mask[:, :9], cache=cache)
        logits.append(model(ids[:, 9:], cache=cache)[1])
        ids[1, :6] = (ids[1, :6] + 1) % 83
    assert torch.equal(*logits)
