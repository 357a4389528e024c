"""Prompt lookup: the same tokens as without, in fewer forwards; drafts that are right where the text repeats."""

from typing import Any

import pytest
import torch
from helpers import random_ids, small_model
from hypothesis import given
from hypothesis import strategies as st

from minigpt.generation import generate
from minigpt.generation.lookup import Drafter

MODEL = small_model(dtype=torch.float64, n_positions=48, vocab_size=11, eos_token_id=None)


class Counter:
    """How many forwards a model makes, and of how many tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lengths: list[int] = []
        inner = MODEL.hidden_states

        def counted(input_ids: Any, *args: Any, **how: Any) -> Any:
            self.lengths.append(input_ids.shape[1])
            return inner(input_ids, *args, **how)

        monkeypatch.setattr(MODEL, "hidden_states", counted)


SAMPLED = {"do_sample": True, "seed": 5, "temperature": 0.5}
WAYS = (
    {}, {"eos_token_id": 4}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 3}, SAMPLED,
    {**SAMPLED, "top_k": 3, "num_return_sequences": 2}, {"min_new_tokens": 6, "eos_token_id": [1, 2, 3]},
    {"overflow": "slide", "max_new_tokens": 60}, {"overflow": "slide", "max_new_tokens": 60, "slide_stride": 15},
)  # fmt: skip


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_the_tokens_are_those_of_plain_decoding(how: dict[str, Any]) -> None:
    for length, drafted in ((1, 7), (12, 1)):
        ids = random_ids(2, length, vocab=11)
        mask = torch.ones_like(ids)
        mask[0, : length // 2] = 0
        chosen = {"max_new_tokens": 20, **how}
        plain = generate(MODEL, ids, mask, **chosen)
        assert torch.equal(generate(MODEL, ids, mask, **chosen, prompt_lookup_num_tokens=drafted), plain)


def test_the_processed_logits_are_those_of_plain_decoding() -> None:
    ids = random_ids(2, 9, vocab=11)
    how = {"max_new_tokens": 30, "output_scores": True}
    plain, drafted = generate(MODEL, ids, **how), generate(MODEL, ids, **how, prompt_lookup_num_tokens=6)
    assert torch.equal(plain.sequences, drafted.sequences)
    error = max((a - b).abs().max().item() for a, b in zip(plain.scores, drafted.scores, strict=True))
    print(f"scores differ by {error:.3g} at a scale of {plain.scores[0].std():.3g}")
    assert error < 1e-5  # float32, to which logits are rounded


def test_repetitive_text_takes_far_fewer_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.tensor([[1, 2, 3, 4] * 6])
    how = {"max_new_tokens": 24}
    plain = generate(MODEL, ids, **how)
    counter = Counter(monkeypatch)
    assert torch.equal(generate(MODEL, ids, **how, prompt_lookup_num_tokens=8), plain)
    print(f"{len(counter.lengths)} forwards for 24 tokens")
    assert len(counter.lengths) <= 12
    assert max(counter.lengths[1:]) == 9


def test_an_end_that_was_foreseen_is_the_end() -> None:
    """Of a model that writes t + 1 after t, and the numbers are in the prompt already."""
    model = small_model(vocab_size=12, tie_word_embeddings=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.ln_f.weight.fill_(1)
        model.wte.weight.copy_(torch.eye(12, 48))
        model.lm_head.weight.copy_(model.wte.weight.roll(1, 0))
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 1, 2]])
    out = generate(model, ids, max_new_tokens=9, eos_token_id=5, prompt_lookup_num_tokens=5)
    assert out[0, 10:].tolist() == [3, 4, 5]


def test_a_draft_follows_what_followed_before() -> None:
    text = [7, 8, 9, 1, 2, 3, 4, 5, 6, 1, 2, 3]
    assert Drafter().draft(text, 4) == [4, 5, 6, 1]
    assert Drafter().draft(text, 0) == []
    assert Drafter().draft([1, 2, 3, 4], 4) == []
    assert Drafter().draft([1], 4) == []


def test_a_draft_of_the_longer_run_and_of_the_later_place_is_preferred() -> None:
    assert Drafter().draft([1, 2, 3, 7, 0, 2, 3, 8, 0, 1, 2, 3], 1) == [7]
    assert Drafter().draft([2, 3, 7, 0, 2, 3, 8, 0, 2, 3], 1) == [8]


@given(period=st.lists(st.integers(0, 5), min_size=1, max_size=5), rounds=st.integers(4, 8), most=st.integers(1, 20))
def test_a_circle_is_foreseen_beyond_what_is_written(period: list[int], rounds: int, most: int) -> None:
    text = period * rounds
    draft = Drafter().draft(text, most)
    assert len(draft) == most
    if len(set(period)) == len(period):  # else a run may have two continuations
        assert draft == (period * (most + 1))[:most]


def test_a_drafter_learns_as_the_text_grows() -> None:
    text, drafter, whole = [], Drafter(), [3, 1, 4, 1, 5, 9, 3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4]
    for token in whole:
        text.append(token)
        assert drafter.draft(text, 3) == Drafter().draft(text, 3)
