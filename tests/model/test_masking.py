"""Who sees whom and which position each token has; and what follows: a padded row is the row alone."""

from collections.abc import Iterator

import pytest
import torch
from helpers import (
    assert_close,
    assert_same_bits,
    left_padding,
    random_ids,
    reference_model,
    same_weights,
    small_model,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import minigpt
from minigpt import GenerationError
from minigpt.model.masking import causal_mask, packed_mask, positions, visible

CPU = torch.device("cpu")
T, F = True, False

# Row 0 is padded on the left, row 1 on the right, row 2 inside, row 3 is nothing but padding.
PADDED = torch.tensor([[F, F, T, T], [T, T, T, F], [T, F, F, T], [F, F, F, F]])


def test_a_query_sees_the_real_keys_up_to_itself() -> None:
    assert visible(None, past=0, seq=3, device=CPU)[0, 0].tolist() == [[T, F, F], [T, T, F], [T, T, T]]
    assert visible(None, past=1, seq=2, device=CPU)[0, 0].tolist() == [[T, T, F], [T, T, T]]
    left, right, inside, nothing = visible(PADDED, past=0, seq=4, device=CPU)[:, 0].tolist()
    assert left == [[F, F, F, F], [F, F, F, F], [F, F, T, F], [F, F, T, T]]
    assert right == [[T, F, F, F], [T, T, F, F], [T, T, T, F], [T, T, T, F]]
    assert inside == [[T, F, F, F], [T, F, F, F], [T, F, F, F], [T, F, F, T]]
    assert nothing == [[F, F, F, F]] * 4


def test_the_fused_kernel_gets_no_mask_where_it_needs_none() -> None:
    assert causal_mask(None, past=0, seq=5, device=CPU) is None
    assert causal_mask(None, past=4, seq=1, device=CPU) is None
    assert torch.equal(causal_mask(None, past=2, seq=2, device=CPU), visible(None, 2, 2, CPU))
    assert torch.equal(causal_mask(PADDED, past=3, seq=1, device=CPU), visible(PADDED, 3, 1, CPU))


def test_a_mask_that_forgets_the_cache_is_refused() -> None:
    model = small_model()
    cache = model.new_cache(2, 8)
    model(random_ids(2, 4), cache=cache)
    with pytest.raises(GenerationError, match=r"must have shape \(2, 5\), the tokens in the cache included"):
        model(random_ids(2, 1), torch.ones(2, 1), cache=cache)
    assert cache.length == 4


# What the model makes of it.


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def model(request: pytest.FixtureRequest, device: torch.device) -> Iterator[minigpt.GPT2]:
    """In float64, where a padded row can be told from the row alone to thirteen digits."""
    return small_model(attention=request.param, dtype=torch.float64, device=device)


@st.composite
def padded_batches(draw: st.DrawFn) -> Tensor:
    """Masks (rows, length) with padding anywhere: left, right, inside, everywhere."""
    length = draw(st.integers(1, 9))
    row = st.lists(st.booleans(), min_size=length, max_size=length)
    side = st.integers(0, length).flatmap(
        lambda n: st.sampled_from([[F] * (length - n) + [T] * n, [T] * n + [F] * (length - n)])
    )
    return torch.tensor(draw(st.lists(side | row, min_size=1, max_size=4)))


def row_alone(model: minigpt.GPT2, ids: Tensor, mask: Tensor) -> Tensor:
    """Logits (real tokens, vocab) of one row without its padding."""
    return model(ids[mask][None])[0]


@given(mask=padded_batches())
@torch.no_grad()
def test_a_row_of_a_padded_batch_is_the_row_alone(model: minigpt.GPT2, mask: Tensor) -> None:
    ids = random_ids(*mask.shape)
    mask, ids = mask.to(model.wte.weight.device), ids.to(model.wte.weight.device)
    logits = model(ids, mask)
    assert logits.isfinite().all()
    for row in range(len(mask)):
        if mask[row].any():
            given, target = logits[row, mask[row]], row_alone(model, ids[row], mask[row])
            assert_close(given, target, 1e-13, f"row {row} of {mask.int().tolist()}")


@torch.no_grad()
def test_positions_given_are_used(model: minigpt.GPT2) -> None:
    device = model.wte.weight.device
    ids, mask = random_ids(3, 6, device=device), left_padding((6, 4, 1), 6, device)
    derived = positions(mask.bool(), 0, 6, device)
    assert_same_bits(model(ids, mask, position_ids=derived), model(ids, mask), "those that it derives")
    one_row = torch.arange(6, device=device)[None]
    assert_same_bits(model(ids, position_ids=one_row), model(ids), "one row for all")
    shifted = model(ids, position_ids=one_row + 3)
    assert (shifted - model(ids)).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_rows_of_padding_alone_are_finite_and_so_are_their_gradients(
    attention: str, dtype: torch.dtype, device: torch.device
) -> None:
    model = small_model(attention=attention, dtype=dtype, device=device).train()
    mask = torch.tensor([[0] * 6, [1] * 6, [0, 0, 1, 1, 0, 1]], device=device)
    logits = model(random_ids(3, 6, device=device), mask)
    assert logits.isfinite().all()
    logits.float().square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("upcast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_padded_rows_are_finite_where_every_score_is_very_low(
    attention: str, dtype: torch.dtype, upcast: bool, device: torch.device
) -> None:
    """A low score plus float16's lowest number is -inf. Where a padded query has nothing else, softmax makes NaN of it,
    and the real tokens of its row read that NaN in the next layer."""
    model = small_model(attention=attention, dtype=dtype, device=device, reorder_and_upcast_attn=upcast)
    for block in model.h:
        query, key, _ = block.attn.c_attn.bias.split(48)
        query.fill_(12.0)
        key.fill_(-12.0)
    mask = left_padding((4, 7), 7, device)
    ids = random_ids(2, 7, device=device)
    logits = model(ids, mask)
    assert logits.isfinite().all()
    alone = row_alone(model, ids[0], mask[0].bool())
    # Scores are about 600, and a last bit of theirs moves every weight by as much: that of float32, where a row's bits
    # depend on how many are computed with it.
    last_bits = 600 if dtype == torch.float32 else 32
    assert_close(logits[0, 3:], alone, last_bits * torch.finfo(dtype).eps, "the padded row")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("arithmetic", ["fast", "reference"])
@torch.no_grad()
def test_texts_that_are_packed_into_one_row_do_not_see_each_other(arithmetic: str, attention: str) -> None:
    """Position ids that begin again, or leave some out, begin another text, as in transformers."""
    hf = reference_model(attention=attention)
    model = same_weights(hf, arithmetic)
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 7, 8], [3, 4, 5, 6, 7, 8, 9, 0, 1]])
    ids = random_ids(2, 9)
    for row_positions in (places, places[:1], places[1:]):
        logits, rows = model(ids, position_ids=row_positions), row_positions.expand(2, -1)
        # Without a cache transformers finds the texts itself. Its eager products then have another memory layout, and
        # on some processors other last bits.
        assert_close(logits, hf(ids, position_ids=rows, use_cache=False).logits, 1e-5, "packed")
        if arithmetic == "reference":
            mask = torch.zeros(2, 1, 9, 9).masked_fill(~packed_mask(rows), torch.finfo(torch.float32).min)
            expected = hf(ids, attention_mask=mask, position_ids=rows).logits
            assert_same_bits(logits, expected, "packed, with a cache")
    alone = model(ids[:, 4:7])
    assert_close(model(ids, position_ids=places[:1])[:, 4:7], alone, 1e-5, "the second text alone")
    assert packed_mask(torch.arange(5, 9)[None]) is None
