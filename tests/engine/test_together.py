"""Texts in one forward compute what they compute alone, and those that join are read along with the others' tokens."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_within, left_padding, make_louder, max_abs, random_ids, small_model
from torch import Tensor, nn

import minigpt
from minigpt.engine.parts import Texts
from minigpt.engine.together import Text, read_each
from minigpt.generation.batch import Batch
from minigpt.generation.decode import rows_of, write_rows
from minigpt.generation.settings import GenerationSettings
from minigpt.model import gpt2 as plain
from minigpt.model.cache import KVCache


def begun(model: minigpt.GPT2, batch: int, past: int, room: int) -> KVCache:
    """A cache that holds ``past`` tokens of each row, the first padded."""
    cache = model.new_cache(batch, room)
    if past:
        model(random_ids(batch, past), left_padding([past - 1] + [past] * (batch - 1), past), cache=cache)
    return cache


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("options", [{}, {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}])
@torch.no_grad()
def test_each_text_is_read_as_if_it_were_alone(attention: str, options: dict[str, Any]) -> None:
    model = small_model(dtype=torch.float64, attention=attention, **options).eval()
    shapes = [(3, 4, 1), (1, 0, 6), (2, 0, 5), (1, 7, 2), (1, 0, 1)]  # rows, tokens in the cache, new tokens
    ids = [random_ids(batch, seq) for batch, _, seq in shapes]
    masks = [None, None, left_padding([2, 5], 5), None, None]
    caches = [begun(model, batch, past, past + seq + 1) for batch, past, seq in shapes]
    mirrored = [begun(model, batch, 0, cache.max_length) for (batch, _, _), cache in zip(shapes, caches, strict=True)]
    for mirror, cache in zip(mirrored, caches, strict=True):
        mirror.store.copy_(cache.store)
        mirror.length, mirror.padding_mask = cache.length, cache.padding_mask
    together = read_each(model, list(map(Text, ids, masks, caches)))
    for text, mask, cache, mirror, given in zip(ids, masks, caches, mirrored, together, strict=True):
        alone = model.hidden_states(text, mask, cache=mirror)
        real = slice(None) if mask is None else mask.bool()
        assert given.shape == alone.shape
        assert_within(max_abs(given[real] - alone[real]), 1e-12 * max_abs(alone), max_abs(alone), f"{text.shape}")
        assert cache.length == mirror.length
        following = random_ids(len(text), 1)
        alone, given = model(following, cache=mirror), model(following, cache=cache)
        assert_within(max_abs(given - alone), 1e-12 * max_abs(alone), max_abs(alone), "the next token")


def forwards(model: minigpt.GPT2, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each forward from now on has for a cache."""
    seen: list[Any] = []
    whole = model.run

    def spy(x: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        seen.append(cache)
        return whole(x, mask, cache)

    monkeypatch.setattr(model, "run", spy)
    return seen


def batch_of(model: minigpt.GPT2, prompts: list[list[int]], **settings: Any) -> tuple[Batch, list[Any]]:
    """One that has written a token of the first two prompts, and rows of the others."""
    chosen = GenerationSettings(max_new_tokens=8, **settings)
    rows = rows_of(model, prompts, chosen, None)
    batch = Batch(model, chosen, len(rows), model.config.n_positions)
    batch.join(rows[:2])
    batch.choose()
    return batch, rows[2:]


def test_who_joins_is_read_along_with_the_tokens_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(dtype=torch.float64)
    prompts = [random_ids(1, length)[0].tolist() for length in (5, 3, 9, 1, 9)]
    batch, new = batch_of(model, prompts)
    seen = forwards(model, monkeypatch)
    batch.read(new)
    (only,) = seen
    assert isinstance(only, Texts)
    assert [tuple(shape) for shape in only.shapes] == [(2, 1), (2, 9), (1, 1)]
    for row, logits in zip(batch.rows, batch.logits, strict=True):
        alone = model(torch.tensor([row.ids]))[0, -1]
        assert_within(max_abs(logits - alone), 1e-5 * max_abs(alone), max_abs(alone), f"prompt {row.prompt}")


class Skip(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        return x


class AsksItsCache(minigpt.GPT2):
    def run(self, x: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        assert cache is None or cache.length >= 0
        return super().run(x, mask, cache)


CHANGES: dict[str, Callable[[Any], object]] = {
    "nobody joins": lambda model: None,
    "a step of its own": lambda model: setattr(
        model, "step", lambda x, mask, cache: plain.GPT2.run(model, x, mask, cache)
    ),
    "a text is long": lambda model: None,
    "somebody watches": lambda model: model.h[0].register_forward_hook(lambda *seen: None),
    "another block": lambda model: model.h.insert(1, Skip()),
    "another block's forward": lambda model: make_louder(model.h[1]),
    "another attention": lambda model: make_louder(model.h[1].attn),
    "another MLP": lambda model: make_louder(model.h[1].mlp),
    "another model": lambda model: setattr(model, "__class__", AsksItsCache),
    "other hidden states": lambda model: setattr(
        model, "hidden_states", lambda *given, inner=model.hidden_states, **how: inner(*given, **how) + 1
    ),
    "no cache": lambda model: None,
}


@pytest.mark.parametrize("why", CHANGES)
def test_otherwise_everybody_is_read_by_the_models_own_forward(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(n_positions=120, dtype=torch.float64)
    CHANGES[why](model)
    prompts = [random_ids(1, length)[0].tolist() for length in (5, 3, 70 if why == "a text is long" else 9)]
    batch, new = batch_of(model, prompts, use_cache=why != "no cache")
    seen = forwards(model, monkeypatch)
    batch.read(() if why == "nobody joins" else new)
    assert seen
    assert not any(isinstance(cache, Texts) for cache in seen)
    for row, logits in zip(batch.rows, batch.logits, strict=True):
        alone = model.head(model.hidden_states(torch.tensor([row.ids])))[0, -1]
        assert_within(max_abs(logits - alone), 1e-5 * max_abs(alone), max_abs(alone), f"prompt {row.prompt}")


def test_who_began_beside_a_long_text_has_the_whole_context_all_the_same() -> None:
    model = small_model(dtype=torch.float64, n_positions=64)
    settings = GenerationSettings(max_new_tokens=60, eos_token_id=None)
    rows = rows_of(model, [random_ids(1, 60)[0].tolist(), [1]], settings, None)
    rows[0].max_new_tokens = 2
    for _ in write_rows(model, rows, settings, 2):
        pass
    alone = minigpt.generate(model, torch.tensor([[1]]), max_new_tokens=60, eos_token_id=None)
    assert rows[1].ids == alone[0].tolist()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_texts_that_join_at_any_time_are_what_they_are_alone(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of them beyond the context, so that windows are read anew among the others."""
    model = small_model(dtype=torch.float64, attention=attention, n_positions=24)
    prompts = [random_ids(1, 1 + 7 * i % 20)[0].tolist() for i in range(14)]
    how: dict[str, Any] = dict(overflow="slide", slide_stride=5, do_sample=True, eos_token_id=None)
    settings = GenerationSettings(seed=3, max_new_tokens=12, **how)
    rows = rows_of(model, prompts, settings, None)
    for number, row in enumerate(rows):
        row.max_new_tokens = 4 + 5 * number % 9
    seen = forwards(model, monkeypatch)
    for _ in write_rows(model, rows, settings, 4):
        pass
    assert sum(isinstance(cache, Texts) for cache in seen) >= 5
    for number, row in enumerate(rows):
        how |= dict(seed=3 + number, max_new_tokens=row.max_new_tokens)
        alone = minigpt.generate(model, torch.tensor([prompts[number]]), **how)
        assert row.ids == alone[0].tolist()
