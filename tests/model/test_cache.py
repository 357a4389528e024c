"""The cache: reading in pieces is reading at once, its owner is the caller, and it refuses what does not fit."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from helpers import assert_close, assert_same_bits, chunks, left_padding, random_ids, small_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import minigpt
from minigpt import GenerationError, KVCache

LONGEST = 12


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def model(request: pytest.FixtureRequest, device: torch.device) -> minigpt.GPT2:
    return small_model(attention=request.param, dtype=torch.float64, device=device, n_positions=LONGEST)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def read_in_pieces(model: minigpt.GPT2, cache: KVCache, ids: Tensor, mask: Tensor | None, cuts: list[int]) -> Tensor:
    """Logits (batch, seq, vocab) of a text read piece by piece; the mask is given with the pieces that have padding."""
    pieces = []
    for start, stop in chunks(ids.shape[1], cuts):
        new = None if mask is None or mask[:, start:stop].all() else mask[:, :stop]
        pieces.append(model(ids[:, start:stop], new, cache=cache))
    return torch.cat(pieces, dim=1)


cuts = st.lists(st.integers(1, LONGEST - 1), max_size=5)


@settings(max_examples=25)
@given(data=st.data(), batch=st.integers(1, 3), seq=st.integers(1, LONGEST), cuts=cuts, spare=st.integers(0, 3))
def test_reading_rows_in_pieces_is_reading_each_alone(
    model: minigpt.GPT2, data: st.DataObject, batch: int, seq: int, cuts: list[int], spare: int
) -> None:
    """Padding nowhere or anywhere, and mentioned only with the piece it is in: the cache remembers it."""
    row = st.just([True] * seq) | st.lists(st.booleans(), min_size=seq, max_size=seq)
    mask = torch.tensor(data.draw(st.lists(row, min_size=batch, max_size=batch))).to(model.wte.weight.device)
    ids = random_ids(batch, seq, device=mask.device)
    with torch.no_grad():
        cache = model.new_cache(batch, seq + spare)
        logits = read_in_pieces(model, cache, ids, mask, cuts)
        assert cache.length == seq
        assert logits.isfinite().all()
        for i in range(batch):
            if mask[i].any():
                alone = model(ids[i][mask[i]][None])[0]
                assert_close(logits[i, mask[i]], alone, 1e-13, f"{mask[i].int().tolist()} in {chunks(seq, cuts)}")


def test_two_callers_with_two_caches_do_not_disturb_each_other(model: minigpt.GPT2) -> None:
    device = model.wte.weight.device
    texts = random_ids(1, 9, device=device), random_ids(3, 11, device=device)
    caches = model.new_cache(1, 9), model.new_cache(3, LONGEST)
    read: tuple[list[Tensor], list[Tensor]] = ([], [])
    for caller, start, stop in ((0, 0, 4), (1, 0, 1), (1, 1, 8), (0, 4, 5), (1, 8, 9), (0, 5, 9), (1, 9, 11)):
        model(random_ids(2, 5, device=device))  # and a third reads without one
        read[caller].append(model(texts[caller][:, start:stop], cache=caches[caller]))
    for ids, logits in zip(texts, read, strict=True):
        assert_close(torch.cat(logits, dim=1), model(ids), 1e-13, f"{ids.shape[0]} rows")


def test_setting_its_length_lower_forgets_the_newer_padding_too(model: minigpt.GPT2) -> None:
    device = model.wte.weight.device
    ids, mask = random_ids(2, 10, device=device), left_padding((7, 10), 10, device)
    cache = model.new_cache(2, 10)
    model(ids, mask, cache=cache)
    cache.length = 5
    given = model(ids[:, 5:], cache=cache)
    assert_close(given, model(ids, mask)[:, 5:], 1e-13, "after going back to 5")
    cache.length = 0
    assert_close(model(ids, cache=cache), model(ids), 1e-13, "after going back to the start")


def test_more_tokens_than_there_is_room_for_are_refused_before_any_is_written(model: minigpt.GPT2) -> None:
    ids = random_ids(2, 9, device=model.wte.weight.device)
    cache = model.new_cache(2, 8)
    before = model(ids[:, :5], cache=cache)
    with pytest.raises(GenerationError, match="the cache holds 5 tokens of at most 8; 4 more do not fit"):
        model(ids[:, 5:], cache=cache)
    assert cache.length == 5
    after = model(ids[:, 5:8], cache=cache)
    assert_close(
        torch.cat([before, after], dim=1), model(ids[:, :8]), 1e-13, "what fits is read as if nothing had been"
    )


def test_padding_takes_room_in_the_cache_and_none_of_the_context(model: minigpt.GPT2) -> None:
    device = model.wte.weight.device
    ids, mask = random_ids(1, LONGEST + 3, device=device), left_padding((LONGEST,), LONGEST + 3, device)
    logits = read_in_pieces(model, model.new_cache(1, LONGEST + 3), ids, mask, [7, 13, 14])
    assert_same_bits(logits[:, 3:].argmax(-1), model(ids[:, 3:]).argmax(-1), "best tokens")
    assert_close(logits[:, 3:], model(ids[:, 3:]), 1e-13, "a full context behind three tokens of padding")


def test_blocks_that_would_write_outside_the_cache_are_refused() -> None:
    model, ids = small_model(n_layer=3), random_ids(1, 5)
    del model.h[0]
    model.config = dataclasses.replace(model.config, n_layer=2)
    with pytest.raises(GenerationError, match=r"each block's attn\.layer must be one of .* renumber"):
        minigpt.generate(model, ids, max_new_tokens=3)
    plain = ids
    for _ in range(3):
        plain = torch.cat([plain, model(plain)[:, -1:].argmax(-1)], dim=1)
    for i, block in enumerate(model.h):
        block.attn.layer = i
    assert torch.equal(minigpt.generate(model, ids, max_new_tokens=3), plain)
