"""Rows of a batch: read together by PyTorch, with settings of their own."""

from typing import Any

import pytest
import torch
from helpers import random_ids, small_model

from minigpt.generation import generate
from minigpt.generation.batch import Batch
from minigpt.generation.row import Row
from minigpt.generation.settings import GenerationSettings, parse_settings
from minigpt.model.masking import left_padded


def test_texts_that_end_together_begin_where_their_mask_does() -> None:
    ids, mask = left_padded([[5, 6, 7, 8, 9], [3, 4], [1, 2, 3]])
    assert ids.tolist() == [[5, 6, 7, 8, 9], [0, 0, 0, 3, 4], [0, 0, 1, 2, 3]]
    assert mask.tolist() == [[1, 1, 1, 1, 1], [0, 0, 0, 1, 1], [0, 0, 1, 1, 1]]


def test_rows_of_different_settings_share_a_batch() -> None:
    model = small_model(dtype=torch.float64)
    ways: list[dict[str, Any]] = [
        {}, {"do_sample": True, "temperature": 1.3, "seed": 5}, {"do_sample": True, "temperature": 1.3, "seed": 6},
        {"do_sample": True, "top_k": 9, "seed": 7}, {"repetition_penalty": 1.8}, {"suppress_tokens": [1, 2, 3]},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5}, {"logit_bias": {4: 3.0, 5: -100.0}}, {},
    ]  # fmt: skip
    texts = [random_ids(1, 3 + number)[0].tolist() for number in range(len(ways))]
    rows = []
    for number, (text, how) in enumerate(zip(texts, ways, strict=True)):
        single = parse_settings(max_new_tokens=4 + number, eos_token_id=None, **how)
        rows.append(Row(list(text), single, prompt=number, seed=single.seed))
    batch = Batch(model, len(rows), 60)
    batch.add(rows)
    while batch.rows:
        batch.step()
    for row, text, how in zip(rows, texts, ways, strict=True):
        alone = generate(
            model, torch.tensor([text]), max_new_tokens=row.settings.max_new_tokens, eos_token_id=None, **how
        )
        assert row.ids == alone[0].tolist(), how


def test_a_budget_is_shared_by_the_texts_that_are_read() -> None:
    """A single unread token is free; a short text leaves the rest of its share to the longer ones."""
    model, settings = small_model(dtype=torch.float64), GenerationSettings(max_new_tokens=40)
    batch = Batch(model, 4, 110)
    batch.add([Row([5], settings)])
    batch.step()
    batch.add([Row([token] * length, settings) for token, length in enumerate((60, 4, 70))])
    step = batch.read(30)
    assert [(len(piece.ids), piece.is_whole) for piece in step] == [
        (1, True),
        (13, False),
        (4, True),
        (13, False),
    ]
    assert len(batch.choose(step)) == 2
    assert len(batch.step(0)) == 2, "those that are decoding"
    assert sum(len(piece.ids) for piece in batch.read()) == 2 + 47 + 57


def test_texts_with_one_prompt_read_it_once() -> None:
    """The last token is read by each, since its logits are needed."""
    model, settings = small_model(), GenerationSettings(max_new_tokens=9, do_sample=True, eos_token_id=None)
    rows = [Row([1, 2, 3, 4, 5], settings, seed=seed) for seed in range(3)] + [Row([1, 2, 3, 4, 6], settings, seed=0)]
    batch = Batch(model, 4, 20)
    batch.add(rows)
    assert [len(piece.ids) for piece in batch.read(6)] == [3, 3]
    counts = []
    while batch.rows:
        step = batch.read()
        counts.append([len(piece.ids) for piece in step])
        batch.choose(step)
    assert counts[:3] == [[2, 2], [1, 1, 1, 1], [1, 1, 1, 1]]
    for row in rows:
        alone = Row(row.ids[:5], settings, seed=row.seed)
        batch.add([alone])
        while batch.rows:
            batch.step()
        assert alone.ids == row.ids


def test_texts_that_end_at_their_first_token_read_their_prompt_once() -> None:
    batch, counts = Batch(small_model(), 3, 20), []
    batch.add([Row([1, 2, 3, 4, 5], GenerationSettings(max_new_tokens=1)) for _ in range(3)])
    while batch.rows:
        pieces = batch.read()
        counts.append([len(piece.ids) for piece in pieces])
        batch.choose(pieces)
    assert counts == [[5], [1, 1]]


def test_an_error_of_one_row_is_its_own() -> None:
    """A server tells one client; the others get their tokens."""

    class Quiet(Row):
        error: Exception | None = None

        def fail(self, error: Exception) -> None:
            self.error = error

    model = small_model(dtype=torch.float64)
    settings = parse_settings(max_new_tokens=3, eos_token_id=None)
    impossible = parse_settings(max_new_tokens=3, suppress_tokens=list(range(83)))
    rows = [Quiet([1, 2], settings), Quiet([3], impossible), Quiet([4], settings)]
    batch = Batch(model, 3, 20)
    batch.add(rows)
    batch.step()
    assert [len(row.new_ids) for row in rows] == [1, 0, 1]
    assert "exclude every token" in str(rows[1].error)


def test_a_step_that_failed_has_read_nothing() -> None:
    """Each row can be read by itself after it."""
    model, settings = small_model(dtype=torch.float64), GenerationSettings(max_new_tokens=3, eos_token_id=None)
    rows = [Row([1, 2, 3], settings), Row([4, 5], settings)]
    batch = Batch(model, 2, 20)
    batch.add(rows)

    def fails_in_company(module: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        if len(inputs[0]) > 1:
            raise ArithmeticError("no company")

    hook = model.h[1].ln_2.register_forward_hook(fails_in_company)
    with pytest.raises(ArithmeticError):
        batch.read()
    pieces = [piece for row in rows for piece in batch.read(only=[row])]
    hook.remove()
    for piece in pieces:
        with torch.no_grad():
            expected = model(torch.tensor([piece.row.ids]))[0, -1:]
        torch.testing.assert_close(piece.logits, expected, rtol=1e-9, atol=1e-9)


def test_a_row_without_room_for_a_token_is_only_read() -> None:
    settings = GenerationSettings(max_new_tokens=1)
    settings.max_new_tokens = 0  # as a server may have it
    row = Row([1, 2, 3], settings)
    row.scores_prompt = True
    batch = Batch(small_model(), 1, 3)
    batch.add([row])
    step = batch.read()
    assert step[0].logits.shape == (3, 83)
    assert batch.choose(step) == [row]
    assert (row.end, row.ids, batch.rows) == ("length", [1, 2, 3], [])


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_row_of_nan_leaves_nothing_to_the_row_that_takes_its_place(place: int) -> None:
    """PyTorch multiplies what is masked by 0, and NaN times 0 is NaN."""
    model = small_model()
    model.ln_f.register_forward_hook(lambda *_: None)  # the kernel does not serve it
    rows = [Row(ids, parse_settings(max_new_tokens=6), prompt=0) for ids in ([*range(30)], [7, 8, 9, 10], [5, 6, 7])]
    batch = Batch(model, 3, 40)
    batch.add(rows)
    batch.step()
    assert batch.reader.kernel is None
    batch.reader.store[:, :, place] = torch.nan
    batch.drop([rows[place]])
    assert not batch.reader.store.isnan().any()
