"""Logits to logits: element for element what transformers computes, alone and in every combination."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoints import reference, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from minigpt import GenerationError
from minigpt.generation import warp
from minigpt.generation.processors import PROCESSORS

Make = Callable[[Any, int, Any], Any]  # of the value, the prompt's length and the ends

# Each of transformers' own processors, in the order in which its ``generate`` applies them.
THEIRS: dict[str, Make] = {
    "logit_bias": lambda value, prompt, ends: SequenceBiasLogitsProcessor({(id,): bias for id, bias in value.items()}),
    "repetition_penalty": lambda value, prompt, ends: RepetitionPenaltyLogitsProcessor(value),
    "no_repeat_ngram_size": lambda value, prompt, ends: NoRepeatNGramLogitsProcessor(value),
    "bad_words_ids": lambda value, prompt, ends: NoBadWordsLogitsProcessor(value, ends),
    "min_new_tokens": lambda value, prompt, ends: MinNewTokensLengthLogitsProcessor(prompt, value, ends),
    "suppress_tokens": lambda value, prompt, ends: SuppressTokensLogitsProcessor(value),
    "temperature": lambda value, prompt, ends: TemperatureLogitsWarper(value),
    "top_k": lambda value, prompt, ends: TopKLogitsWarper(value),
    "top_p": lambda value, prompt, ends: TopPLogitsWarper(value),
    "min_p": lambda value, prompt, ends: MinPLogitsWarper(value),
}
OPENAI = ("frequency_penalty", "presence_penalty")  # transformers has neither
NOT_APPLIED = {"top_p": 1}  # by its ``generate``


def by_transformers(
    logits: Tensor, ids: Tensor | None = None, prompt_length: int = 0, eos_token_id: Any = 0, **chosen: Any
) -> Tensor:
    """What transformers' own processors make of the logits."""
    ids = torch.zeros(len(logits), 1, dtype=torch.long) if ids is None else ids
    return LogitsProcessorList(
        make(chosen[name], prompt_length, eos_token_id)
        for name, make in THEIRS.items()
        if chosen.get(name) is not None and chosen[name] != NOT_APPLIED.get(name)
    )(ids, logits)


def random_logits(kind: str, batch: int, vocab: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    logits = torch.randn(batch, vocab, generator=torch.Generator().manual_seed(seed)) * 4
    return {
        "usual": logits,
        "tied": logits.round(),
        "constant": torch.full_like(logits, 1.5),
        "peaked": logits * 100,
        "partly excluded": logits.masked_fill(logits < 2, -torch.inf).index_fill(1, torch.tensor([0]), 1.0),
    }[kind].to(dtype)


KINDS = ("usual", "tied", "constant", "peaked", "partly excluded")
TEMPERATURES = st.one_of(st.none(), st.floats(0.01, 100), st.sampled_from([1.0, 2.0, 0.5]))
TOP_KS = st.one_of(st.none(), st.integers(1, 60), st.sampled_from([1, 10**6]))
TOP_PS = st.one_of(st.none(), st.floats(1e-6, 1), st.sampled_from([1.0, 1e-30, 0.9, 0.5]))


def random_text(batch: int, seq: int, vocab: int, seed: int) -> Tensor:
    """Ids (batch, seq) of one to four kinds, so that runs of them come again."""
    few = torch.randint(vocab, (4,), generator=torch.Generator().manual_seed(seed))
    return few[torch.randint(1 + seed % 4, (batch, seq), generator=torch.Generator().manual_seed(seed + 1))]


VOCAB = 40
TOKEN = st.integers(0, VOCAB - 1)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "logit_bias": st.dictionaries(TOKEN, st.floats(-100, 100, width=32), min_size=1, max_size=5),
    "repetition_penalty": st.floats(0.1, 5),
    "no_repeat_ngram_size": st.one_of(st.integers(1, 4), st.integers(30, 40)),
    "bad_words_ids": st.lists(st.lists(TOKEN, min_size=1, max_size=3), min_size=1, max_size=5),
    "min_new_tokens": st.integers(1, 12),
    "suppress_tokens": st.lists(TOKEN, min_size=1, max_size=6),
    "temperature": TEMPERATURES.filter(bool),
    "top_k": TOP_KS.filter(bool),
    "top_p": TOP_PS.filter(bool),
    "min_p": st.floats(0, 1),
}
SITUATIONS = st.fixed_dictionaries({
    "kind": st.sampled_from(KINDS), "batch": st.integers(1, 3), "seq": st.integers(1, 60), "prompt": st.integers(1, 12),
    "seed": st.integers(0, 10**6), "ends": st.one_of(TOKEN, st.lists(TOKEN, min_size=1, max_size=3)),
})  # fmt: skip


def assert_as_in_transformers(at: dict[str, Any], chosen: dict[str, Any]) -> None:
    """Element for element, in the same dtype, and the input untouched."""
    logits = random_logits(at["kind"], at["batch"], VOCAB, at["seed"])
    ids = random_text(at["batch"], at["seq"], VOCAB, at["seed"])
    prompt = min(at["prompt"], at["seq"])
    if chosen.get("bad_words_ids"):  # some of them are about to be completed
        words = [*chosen["bad_words_ids"], [*ids[0, -2:].tolist(), 7], [int(ids[-1, -1]), 9]]
        # Before 5.18, transformers overlooks a run that the whole of a text begins.
        chosen["bad_words_ids"] = [word for word in words if len(word) <= ids.shape[1]] or [[9]]
    before = logits.clone()
    ours = warp(logits, ids, prompt_length=prompt, eos_token_id=at["ends"], **chosen)
    hf = by_transformers(logits.clone(), ids, prompt, at["ends"], **chosen)
    assert torch.equal(ours.nan_to_num(nan=1e30), hf.nan_to_num(nan=1e30))
    assert ours.dtype == hf.dtype
    assert torch.equal(logits, before), "the input was written to"


def test_every_processor_is_compared_in_the_order_of_transformers() -> None:
    assert [name for name in PROCESSORS if name not in OPENAI] == list(THEIRS) == list(VALUES)


def test_penalties_count_what_was_added_as_the_openai_formula_does() -> None:
    ids = torch.tensor([[1, 2, 3, 3, 4], [5, 6, 7, 8, 7]])  # two tokens of prompt
    logits = torch.randn(2, 9)
    count = torch.tensor([[0, 0, 0, 2, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 2, 1]])
    out = warp(logits, ids, prompt_length=2, frequency_penalty=0.7, presence_penalty=-1.1)
    torch.testing.assert_close(out, logits - 0.7 * count + 1.1 * (count > 0))


@pytest.mark.parametrize("name", THEIRS)
@settings(max_examples=25)
@given(data=st.data(), at=SITUATIONS)
def test_each_processor_alone_is_that_of_transformers(name: str, data: st.DataObject, at: dict[str, Any]) -> None:
    assert_as_in_transformers(at, {name: data.draw(VALUES[name])})


@settings(max_examples=100)
@given(at=SITUATIONS, chosen=st.fixed_dictionaries({}, optional=VALUES))
def test_combinations_of_all_processors_are_those_of_transformers(at: dict[str, Any], chosen: dict[str, Any]) -> None:
    assert_as_in_transformers(at, chosen)


def test_a_run_that_the_whole_text_begins_is_not_completed() -> None:
    out = warp(torch.zeros(1, 9), torch.tensor([[3, 5]]), bad_words_ids=[[3, 5, 7], [1, 3, 5, 6]])
    assert (out[0] == -torch.inf).nonzero().flatten().tolist() == [7]


HUGE: dict[str, tuple[int, Callable[[], dict[str, Any]]]] = {  # the length of a text, and the settings
    "n-grams": (200_000, lambda: {"no_repeat_ngram_size": 17}),
    "many words of each length": (5000, lambda: {"bad_words_ids": [[5] * (i % 400 + 1) for i in range(4000)]}),
    "many words of one beginning": (100, lambda: {"bad_words_ids": [[5, 5, i % 50_000] for i in range(80_000)]}),
    "many ids": (100, lambda: {"suppress_tokens": [i % 50_000 for i in range(500_000)]}),
    "many biases": (100, lambda: {"logit_bias": dict.fromkeys(range(50000), 1.0)}),
    "many ends": (100, lambda: {"min_new_tokens": 5, "eos_token_id": [*range(50_000)]}),
    "penalties": (300_000, lambda: {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "presence_penalty": 1.0}),
}


@pytest.mark.parametrize("kind", HUGE)
def test_time_and_memory_are_linear_in_the_text_and_in_a_setting(kind: str) -> None:
    """A quadratic one would take minutes, or tens of gigabytes."""
    length, settings_of = HUGE[kind]
    how = settings_of()
    logits, ids = torch.zeros(4, 50_257), torch.full((4, length), 5)
    begun = time.process_time()
    warp(logits, ids, prompt_length=0, **how)
    spent = time.process_time() - begun
    print(f"{kind}: {spent:.2f} s")
    assert spent < 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "chosen",
    [{"temperature": 0.7}, {"temperature": 1.3}, {"top_k": 1}, {"top_k": 40}, {"top_k": 5000}, {"top_k": 5001},
     {"top_p": 0.1}, {"top_p": 0.92}, {"top_p": 1.0}, {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
     {"min_p": 0.02}, {"min_p": 1.0}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_large_vocabulary_is_that_of_transformers(kind: str, chosen: dict[str, Any], dtype: torch.dtype) -> None:
    logits = random_logits(kind, 3, 5000, seed=7, dtype=dtype)
    assert torch.equal(warp(logits, **chosen), by_transformers(logits, **chosen))


@pytest.mark.parametrize(
    "chosen",
    [{"temperature": 0.6}, {"top_k": 7}, {"top_p": 0.8}, {"temperature": 1.7, "top_k": 20, "top_p": 0.7}],
    ids=str,
)
def test_the_order_is_that_of_transformers_generate(chosen: dict[str, Any]) -> None:
    """The raw logits and the processed scores of its own sampling, not processors that this file put in order."""
    out = reference().generate(
        tokens(2, 5), attention_mask=torch.ones(2, 5), max_new_tokens=6, do_sample=True, eos_token_id=None,
        pad_token_id=0, output_logits=True, output_scores=True, return_dict_in_generate=True,
        **{"top_k": 0, **chosen},  # its default is 50
    )  # fmt: skip
    assert len(out.scores) == 6
    for logits, scores in zip(out.logits, out.scores, strict=True):
        assert torch.equal(warp(logits, out.sequences, **chosen), scores)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("logits", "ids", "how", "argument"),
    [
        ([[0.0] * 4], None, {}, "logits"),
        (torch.zeros(4), None, {}, "logits"),
        (torch.zeros(1, 4), torch.ones(2, 2).long(), {}, "input_ids"),
        (torch.zeros(1, 4), torch.ones(1, 2).long(), {"prompt_length": 3}, "prompt_length"),
        (torch.zeros(1, 4), None, {"repetition_penalty": 1.5}, "input_ids"),
        (torch.zeros(1, 4), None, {"bad_words_ids": [[9, 1], [12]]}, "bad_words_ids"),
        (torch.zeros(1, 4), None, {"top_k": -1}, "top_k"),
    ],
)
def test_tensors_and_settings_are_judged(logits: Any, ids: Any, how: dict[str, Any], argument: str) -> None:
    with pytest.raises(GenerationError) as refused:
        warp(logits, ids, **how)
    assert refused.value.argument == argument


@pytest.mark.usefixtures("unchecked")
def test_ids_that_are_no_ids_of_the_vocabulary() -> None:
    for ids in (torch.zeros(1, 2), torch.full((1, 2), 4)):
        with pytest.raises(GenerationError, match=r"input_ids|4"):
            warp(torch.zeros(1, 4), ids, repetition_penalty=2.0)
