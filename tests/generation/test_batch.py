"""Rows of a batch: read together by PyTorch, with settings of their own."""

import torch
from helpers import small_model

from minigpt.generation.batch import Batch
from minigpt.generation.row import Row
from minigpt.generation.settings import GenerationSettings
from minigpt.inputs import left_padded


def test_texts_that_end_together_begin_where_their_mask_does() -> None:
    ids, mask = left_padded([[5, 6, 7, 8, 9], [3, 4], [1, 2, 3]])
    assert ids.tolist() == [[5, 6, 7, 8, 9], [0, 0, 0, 3, 4], [0, 0, 1, 2, 3]]
    assert mask.tolist() == [[1, 1, 1, 1, 1], [0, 0, 0, 1, 1], [0, 0, 1, 1, 1]]


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


def test_texts_that_end_at_their_first_token_read_their_prompt_once() -> None:
    batch, counts = Batch(small_model(), 3, 20), []
    batch.add([Row([1, 2, 3, 4, 5], GenerationSettings(max_new_tokens=1)) for _ in range(3)])
    while batch.rows:
        pieces = batch.read()
        counts.append([len(piece.ids) for piece in pieces])
        batch.choose(pieces)
    assert counts == [[5], [1, 1]]


def test_a_row_without_room_for_a_token_is_only_read() -> None:
    settings = GenerationSettings(max_new_tokens=1).with_new_tokens(0)  # as a server may have it
    row = Row([1, 2, 3], settings)
    row.scores_prompt = True
    batch = Batch(small_model(), 1, 3)
    batch.add([row])
    step = batch.read()
    assert step[0].logits.shape == (3, 83)
    assert batch.choose(step) == [row]
    assert (row.end, row.ids, batch.rows) == ("length", [1, 2, 3], [])
