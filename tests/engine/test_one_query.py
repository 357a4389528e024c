"""A single query's attention by the quick way is the kernel's own, however keys and values lie."""

from collections.abc import Callable

import pytest
import torch
from helpers import SMALL, assert_close, left_padding, random_ids, rms, small_model
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from minigpt import GPT2Config
from minigpt.engine import one_query
from minigpt.model.attention import CausalSelfAttention

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


@pytest.mark.parametrize("dtype", one_query.HALVES, ids=str)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(("few", "error"), [(one_query.FEW, 1.05), (0, 1.4)], ids=["few", "many"])
@torch.inference_mode()
def test_a_single_query_in_half_precision_is_as_near_the_truth_as_the_kernels_own(
    few: int, error: float, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_query, "FEW", few)
    module = CausalSelfAttention(GPT2Config(**SMALL), 0, "sdpa").eval()
    q, k, v, visible = single_query(dtype)
    mask = MASKS[kind](visible, dtype)
    assert one_query.suits(q)
    truth = scaled_dot_product_attention(
        q.double(), k.double(), v.double(), None if mask is None else visible, scale=module.scale
    )
    kernel = scaled_dot_product_attention(q, k, v, mask, scale=module.scale)
    given = module.sdpa(q, k, v, mask)
    assert given.dtype == dtype
    assert rms(given - truth) <= error * rms(kernel - truth)  # many weights are rounded, each once
    assert_close(given, truth.to(dtype), 2 * torch.finfo(dtype).eps, "a single query")


@pytest.mark.parametrize("dtype", [*one_query.HALVES, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", MASKS)
@torch.inference_mode()
def test_what_a_compiler_is_given_is_the_same_formula(kind: str, dtype: torch.dtype) -> None:
    q, k, v, visible = single_query(dtype)
    truth = scaled_dot_product_attention(
        q.double(), k.double(), v.double(), None if kind == "none" else visible, scale=0.3
    )
    given = one_query.written_out(q, k, v, MASKS[kind](visible, dtype), 0.3)
    assert given.dtype == dtype
    assert_close(given, truth.to(dtype), 8 * torch.finfo(dtype).eps, "written out")


def test_it_is_for_inference_without_autocast() -> None:
    q = single_query(torch.bfloat16)[0]
    assert not one_query.suits(q), "gradients may be asked for"
    with torch.no_grad():
        assert one_query.suits(q)
        with torch.autocast("cpu"):
            assert not one_query.suits(q)


LAYS = {
    "whole": lambda store: store,
    "from the first column": lambda store: store[:, :, :20],
    "from a later column": lambda store: store[:, :, 7:],
    "some rows": lambda store: store[1:3, :, 3:9],
    "one row": lambda store: store[2:3],
    "heads second": lambda store: store.transpose(1, 2).contiguous().transpose(1, 2),
    "one row for all": lambda store: store[:1].expand(4, -1, -1, -1),
    "one head for all": lambda store: store[:1, :1].expand(1, 3, -1, -1),
    "in reverse": lambda store: store.transpose(2, 3).contiguous().transpose(2, 3),
}


@pytest.mark.parametrize("lay", LAYS.values(), ids=LAYS)
@torch.inference_mode()
def test_a_weighted_sum_reads_values_however_they_lie(lay: Callable[[Tensor], Tensor]) -> None:
    values = lay(torch.randn(4, 3, 31, 8))
    weights = torch.rand(*values.shape[:2], 1, values.shape[2])
    assert_close(one_query.weighted_sum(weights, values), weights @ values, 1e-6, "a weighted sum")


@torch.inference_mode()
def test_what_is_masked_counts_nothing_and_a_query_that_sees_nothing_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_query, "FEW", 0)
    q, k, v = (torch.randn(3, 2, seq, 8).bfloat16() for seq in (1, 10, 10))
    visible = torch.arange(10).ge(torch.tensor([0, 4, 10])[:, None])[:, None, None]  # (3, 1, 1, 10)
    for attend in (one_query.attend, one_query.written_out):
        given = attend(q, k, v, visible, 0.5)
        others = [x.clone() for x in (k, v)]
        others[0][1, :, :4], others[1][1, :, :4] = 1e4, -1e4
        assert torch.equal(attend(q, *others, visible, 0.5)[:2], given[:2])
        assert given.isfinite().all()


@pytest.mark.parametrize("kind", ["bool", "minus infinity"])
@torch.inference_mode()
def test_where_all_is_hidden_nothing_is_nan(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_query, "FEW", 0)
    q, k, v, visible = single_query(torch.bfloat16)
    visible[2] = False
    mask = visible if kind == "bool" else torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)
    for attend in (one_query.attend, one_query.written_out):
        assert attend(q, k, v, mask, 0.5).isfinite().all()


@pytest.mark.parametrize("dtype", one_query.HALVES, ids=str)
@torch.inference_mode()
def test_equal_weights_are_good_to_an_epsilon(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are all rounded to the same side."""
    monkeypatch.setattr(one_query, "FEW", 0)
    k, v = torch.randn(2, 2, 3, 900, 16).to(dtype)
    v += 1
    given = one_query.attend(torch.zeros(2, 3, 1, 16, dtype=dtype), k, v, None, 0.5)
    assert_close(given.double(), v.double().mean(2, keepdim=True), torch.finfo(dtype).eps, "the mean")


@torch.inference_mode()
def test_a_default_device_or_a_mode_leaves_nothing_behind() -> None:
    weights, values = torch.rand(3, 2, 1, 17), torch.randn(3, 2, 17, 8)
    with torch.device("meta"):
        assert_close(one_query.weighted_sum(weights, values), weights @ values, 1e-6, "on another default device")
    one_query._rows.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        one_query.weighted_sum(weights, values)
    assert_close(one_query.weighted_sum(weights, values), weights @ values, 1e-6, "after it")


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
