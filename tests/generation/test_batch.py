"""Rows of a batch: read together by PyTorch, with settings of their own."""

import threading
from typing import Any

import pytest
import torch
from helpers import random_ids, small_model
from torch.nn.attention import SDPBackend, sdpa_kernel

from minigpt import GPT2
from minigpt.device import of_any_length
from minigpt.generation import generate
from minigpt.generation.batch import Batch
from minigpt.generation.decode import rows_of, write_rows
from minigpt.generation.row import Row
from minigpt.generation.settings import GenerationSettings, parse_settings
from minigpt.model.masking import left_padded


def batch_of(model: GPT2, texts: list[list[int]]) -> Batch:
    settings = GenerationSettings(max_new_tokens=1)
    batch = Batch(model, len(texts), 110)
    batch.join([Row(text, settings, prompt=number) for number, text in enumerate(texts)])
    return batch


@pytest.mark.parametrize(
    ("lengths", "shapes"),
    [
        ([100, 3, 2, 3, 2], [(4, 3), (1, 100)]),
        ([9], [(1, 9)]),
        ([80, 80, 2, 40, 50], [(1, 2), (2, 50), (2, 80)]),
    ],
    ids=str,
)
def test_pytorch_reads_texts_of_similar_length_together(
    lengths: list[int], shapes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(dtype=torch.float64)  # which the kernel does not serve
    texts = [random_ids(1, length)[0].tolist() for length in lengths]
    alone = [batch_of(model, [text]).logits[0] for text in texts]
    seen: list[tuple[int, ...]] = []
    whole = model.hidden_states
    monkeypatch.setattr(model, "hidden_states", lambda ids, *a, **how: seen.append(ids.shape) or whole(ids, *a, **how))
    batch = batch_of(model, texts)
    assert sorted(seen) == sorted(shapes)
    assert sorted(row.prompt for row in batch.rows) == list(range(len(texts)))
    for row, logits in zip(batch.rows, batch.logits, strict=True):
        torch.testing.assert_close(logits, alone[row.prompt], rtol=1e-5, atol=1e-6)


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
        own = parse_settings(max_new_tokens=4 + number, eos_token_id=None, **how)
        rows.append(Row(list(text), own, prompt=number, seed=own.seed))
    batch = Batch(model, len(rows), 60)
    batch.join(rows)
    for _ in range(4 + len(rows)):
        if batch.rows:
            batch.choose()
            batch.read()
    for row, text, how in zip(rows, texts, ways, strict=True):
        alone = generate(
            model, torch.tensor([text]), max_new_tokens=row.settings.max_new_tokens, eos_token_id=None, **how
        )
        assert row.ids == alone[0].tolist(), how


@pytest.mark.parametrize("how", [{}, {"prompt_lookup_num_tokens": 4}], ids=["", "lookup"])
@pytest.mark.parametrize("alone", [False, True], ids=["one of several", "alone"])
def test_a_growing_text_is_not_for_cudnn(alone: bool, how: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """It would plan anew for every length; it stays where it was asked for by itself, and otherwise is back after."""
    model, whole = small_model(dtype=torch.float64), GPT2.run  # which the kernel does not serve
    settings = parse_settings(max_new_tokens=9, eos_token_id=None, **how)
    seen: set[bool] = set()

    def spy(*given: Any) -> torch.Tensor:
        seen.add(torch.backends.cuda.cudnn_sdp_enabled())
        with sdpa_kernel(SDPBackend.MATH):  # a CPU has no other that could be alone
            return whole(*given)

    monkeypatch.setattr(GPT2, "run", spy)
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, *([] if alone else others)]):
        for row in write_rows(model, rows_of(model, [[1, 2, 3]], settings, None), settings, 1):
            assert torch.backends.cuda.cudnn_sdp_enabled(), f"after {len(row.new_ids)} tokens"
    assert seen == {alone}


def test_of_several_threads_the_last_puts_it_back() -> None:
    entered, left = threading.Event(), threading.Event()

    def first() -> None:
        with of_any_length():
            entered.set()
            left.wait(10)

    assert torch.backends.cuda.cudnn_sdp_enabled()
    thread = threading.Thread(target=first)
    thread.start()
    entered.wait(10)
    with of_any_length():  # begins second, ends last
        left.set()
        thread.join()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()
