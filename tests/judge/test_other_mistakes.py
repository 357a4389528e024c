"""The mistake of a port of any architecture is named by its logits alone."""

from pathlib import Path
from typing import Any

import ported
import pytest
import torch
from architectures import ARCHITECTURES, random_model
from torch import nn
from transformers import AutoModelForCausalLM

import minigpt
from minigpt.checkpoint.transformers_model import load_with_transformers
from minigpt.errors import MiniGPTError
from minigpt.judge.mistakes import Swaps, mistakes_of
from minigpt.judge.mistakes.changed import rebuilt
from minigpt.judge.mistakes.heads import turn_halves, turn_neighbours
from minigpt.judge.mistakes.mistake import OF_OTHER
from minigpt.judge.reference import judging
from minigpt.progress import quiet_transformers

IDS = torch.tensor([[5, 17, 42, 8, 23, 11, 9, 30, 2, 7]])
FEW = ["qwen3", "pythia", "gemma3", "qwen2_moe", "falcon"]
EVERY = [
    pytest.param(name, marks=() if name in FEW else pytest.mark.thorough) for name in ARCHITECTURES if name != "gpt2"
]
PLANTS = [
    "rope theta 10,000 in place of 500,000",
    *(
        pytest.param(words, marks=pytest.mark.thorough)
        for words in (
            "rotary pairs of neighbours",
            "a sliding window of 9 in place of 8",
            "the norms of q and k after the rotation",
            "no soft cap of the logits",
        )
    ),
]


def original_of(family: str, root: Path) -> minigpt.Original:
    ported.random_family(family, root)
    return minigpt.Original(root, prompts=ported.PROMPTS, max_new_tokens=4, device="cpu")


@pytest.mark.parametrize("words", PLANTS)
def test_a_ports_mistake_is_named_and_no_other(words: str, tmp_path: Path) -> None:
    family, settings = next((family, settings) for family, plant, settings in ported.single_plants() if plant == words)
    original = original_of(family, tmp_path)
    right = original.judge(ported.Port(tmp_path), diagnose=True)
    assert right.passed
    assert right.diagnosis is None
    report = original.judge(ported.Port(tmp_path, **settings), diagnose=True)
    assert report.diagnosis is not None
    (found,) = report.diagnosis
    print(f"{found.mistake}: {found.ratio:.3g} times the noise, at most 2")
    assert words in found.mistake
    assert " or " not in found.mistake
    assert found.explains
    assert report.bitwise is None


def test_a_mistake_that_the_long_text_alone_shows_is_named(tmp_path: Path) -> None:
    ported.random_family("mistral", tmp_path, sliding_window=40)
    original = minigpt.Original(tmp_path, max_new_tokens=4, device="cpu")
    assert max(len(prompt.ids) for prompt in original.truth.texts.prompts) < 40
    report = original.judge(ported.Port(tmp_path, window=41), diagnose=True)
    assert report.diagnosis is not None
    assert [found.mistake for found in report.diagnosis] == ["a sliding window of 41 in place of 40"]


@pytest.mark.parametrize("name", EVERY)
def test_a_model_is_rebuilt_to_its_bits_and_every_mistake_is_taken_out_again(name: str) -> None:
    with judging(), quiet_transformers():
        model = random_model(name)
        before = model(IDS, use_cache=False).logits
        with Swaps() as swaps:
            rebuilt(lambda config: None)(model, swaps)
            assert torch.equal(model(IDS, use_cache=False).logits, before)
            shared = {id(parameter) for parameter in model.parameters()}
        assert shared == {id(parameter) for parameter in model.parameters()}
        for make in OF_OTHER:
            for mistake in make(model):
                with Swaps() as swaps:
                    try:
                        mistake.put(model, swaps)
                    except MiniGPTError:  # a config that these weights do not fit
                        continue
                assert model.training is False
        assert torch.equal(model(IDS, use_cache=False).logits, before)


def test_the_two_orders_of_rotary_pairs_undo_each_other() -> None:
    def as_given(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return q, k

    q, k, cos = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8), torch.ones(1, 3, 6)
    once = turn_neighbours(as_given, q, k, cos, cos)
    assert not torch.equal(once[0], q)
    assert torch.equal(once[0][..., 6:], q[..., 6:])  # this part is not rotated
    assert all(torch.equal(x, y) for x, y in zip(turn_halves(as_given, *once, cos, cos), (q, k), strict=True))


@pytest.mark.thorough
def test_a_model_whose_weights_stay_in_their_files_has_no_mistakes_in_its_modules(tmp_path: Path) -> None:
    ported.random_family("llama", tmp_path)
    rotary = "no rotary positions"
    assert rotary in {mistake.words for mistake in mistakes_of(load_with_transformers(tmp_path))}
    assert rotary not in {mistake.words for mistake in mistakes_of(load_with_transformers(tmp_path, memory=0))}
    original = minigpt.Original(tmp_path, prompts=ported.PROMPTS, device="cpu", memory=0)
    found = original.judge(ported.Port(tmp_path, returned="log"), diagnose=True)
    assert found.diagnosis is not None
    assert [one.mistake for one in found.diagnosis] == ["log-probabilities in place of logits"]
    assert any("no mistake in attention" in note for note in found.notes)


def test_linear_layers_in_int8_are_named_as_those_of_torchao(tmp_path: Path) -> None:
    """A head that is tied to the embedding is rounded, and the embedding is not. Steps are those of torchao 0.18."""
    ported.random_family("qwen2", tmp_path, hidden_size=64, intermediate_size=64)
    original = minigpt.Original(tmp_path, prompts=ported.PROMPTS, max_new_tokens=4, device="cpu")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            scale = module.weight.detach().abs().amax(1, keepdim=True) / ((127 + 128) / 2)
            steps = (module.weight.detach() * scale.reciprocal()).round().clamp(-128, 127).to(torch.int8)
            module.weight = nn.Parameter(steps * scale)
    report = original.judge(lambda ids: model(ids, use_cache=False).logits, diagnose=True)
    assert report.diagnosis is not None
    (found,) = report.diagnosis
    assert found.mistake == "the weights of linear layers rounded to int8, as torchao does"
    assert found.ratio < 2
