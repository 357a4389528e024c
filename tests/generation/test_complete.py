"""Many prompts: each text has its own seed, a free place is taken at once, errors come before work."""

from typing import Any

import pytest
import torch
from checkpoints import tiny_bpe
from helpers import small_model

from minigpt import GPT2, GenerationError, Tokenizer
from minigpt.generation import Completion, complete, generate, stream
from minigpt.generation.row import Row
from minigpt.generation.settings import parse_settings

pytestmark = pytest.mark.thorough

SHAPE: Any = dict(dtype=torch.float64, n_positions=64, vocab_size=300, eos_token_id=[7, 20, 33, 150, 151, 152])
MODEL = small_model(**SHAPE)
TOKENIZER = Tokenizer(tiny_bpe(300))
TEXTS = ["the dog", "naïve café", "I saw the other dog there", "", "狗", "x" * 20, "\n\n", "the the the", "a", "1 2 3"]
SAMPLED = {"do_sample": True, "temperature": 1.5, "top_k": 60, "seed": 70}


def alone(prompt: str, number: int, **how: Any) -> list[int]:
    """The new tokens of one prompt by itself; text ``number`` draws with the seed that far from the first."""
    ids = TOKENIZER.encode(prompt) or [0]
    how |= {"seed": how["seed"] + number} if "seed" in how else {}
    return generate(MODEL, torch.tensor([ids]), tokenizer=TOKENIZER, **how)[0, len(ids) :].tolist()


def by_place(results: list[Completion]) -> dict[tuple[int, int], list[int]]:
    actual = {(result.prompt, result.number): result.ids for result in results}
    assert len(actual) == len(results), "a text was written twice"
    return actual


def test_several_texts_of_each_prompt_have_seeds_of_their_own() -> None:
    how = {**SAMPLED, "max_new_tokens": 9}
    prompts = ["the dog", "a", "x"]
    results = by_place(list(complete(MODEL, TOKENIZER, prompts, batch_size=4, num_return_sequences=3, **how)))
    assert results == {(i, j): alone(prompts[i], 3 * i + j, **how) for i in range(3) for j in range(3)}


def watched() -> tuple[GPT2, list[int]]:
    """A model, and of how many texts each step has asked its head for logits."""
    model, sizes = small_model(**SHAPE, tie_word_embeddings=False), list[int]()
    model.lm_head.register_forward_hook(lambda _, inputs, __: sizes.append(inputs[0].shape[-2]))
    return model, sizes


def test_a_free_place_is_taken_at_once() -> None:
    """As long as prompts are waiting, every place is writing; and no more steps are made than that takes."""
    model, sizes = watched()
    results = list(complete(model, TOKENIZER, TEXTS, batch_size=3, max_new_tokens=30, **SAMPLED))
    lengths = [len(result.ids) for result in results]
    assert len({*lengths}) > 3, "they all end together"
    assert sum(sizes) == sum(lengths)
    assert sizes == sorted(sizes, reverse=True), "a place stood empty before the last prompt was taken"
    assert max(sizes) == 3


def test_texts_come_as_they_are_finished_and_no_sooner_worked_on() -> None:
    model, steps = watched()
    results = complete(model, TOKENIZER, TEXTS, max_new_tokens=30, **SAMPLED)
    assert not steps
    assert len(next(results).ids) == len(steps)


def test_ends_and_texts() -> None:
    how = {**SAMPLED, "max_new_tokens": 25, "temperature": 5.0, "top_k": None}
    results = list(complete(MODEL, TOKENIZER, TEXTS, **how, stop="e", output_logprobs=True))
    assert {result.end for result in results} >= {"eos", "length"}
    for result in results:
        body = result.ids[:-1] if result.end == "eos" else result.ids
        assert result.text == TOKENIZER.decode(body).partition("e")[0]
        assert result.logprobs is not None
        assert len(result.logprobs) == len(result.ids)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no room": ({"max_new_tokens": 64}, "^prompt 0: max_new_tokens .*64"),
    "a long prompt": ({"prompts": ["a", "x" * 70]}, "^prompt 1: .*70"),
    "no text": ({"prompts": ["\ud800"]}, "^prompt 0: text "),
    "no places": ({"batch_size": 0}, "^batch_size .*0"),
    "one text": ({"prompts": "abc"}, "^prompts .*str"),
    "scores": ({"output_scores": True}, "^output_scores .*output_logprobs"),
}


@pytest.mark.parametrize(("wrong", "complaint"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_is_said_at_the_call(wrong: dict[str, Any], complaint: str) -> None:
    how = {"prompts": ["a"], "max_new_tokens": 4, **wrong}
    with pytest.raises(GenerationError, match=complaint):
        complete(MODEL, TOKENIZER, **how)


def test_the_tokenizer_of_somebody_else_is_refused() -> None:
    other: Any = TOKENIZER.backend
    for call in (
        lambda: complete(MODEL, other, ["a"], max_new_tokens=4),
        lambda: stream(MODEL, other, "a", max_new_tokens=4),
        lambda: generate(MODEL, torch.tensor([[5]]), max_new_tokens=4, stop="x", tokenizer=other),
    ):
        with pytest.raises(GenerationError, match=r"^tokenizer "):
            call()


class Bare:
    """All that a prompt with text in it takes of a tokenizer."""

    encode, decode_bytes = TOKENIZER.encode, TOKENIZER.decode_bytes


def test_a_tokenizer_need_have_no_end() -> None:
    pieces = stream(MODEL, Bare(), "the dog", max_new_tokens=4)
    assert list(pieces) == list(stream(MODEL, TOKENIZER, "the dog", max_new_tokens=4))
    with pytest.raises(GenerationError, match="the prompt is empty, and the tokenizer has no end-of-text token"):
        stream(MODEL, Bare(), "", max_new_tokens=4)


def test_chances_are_drawn_as_they_are_needed_and_are_those_of_the_seed() -> None:
    settings = parse_settings(max_new_tokens=10**30, do_sample=True)
    row = Row([5], settings, seed=3)
    whole = torch.rand(3000, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    assert torch.equal(row.chances(2), whole[:2])
    for token in range(2500):
        row.push(token)
    assert torch.equal(row.chances(500), whole[2500:])
