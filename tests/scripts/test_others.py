"""scripts/bench/others.py: it is ``minigpt bench`` with more contestants, and llama.cpp computes our logits."""

from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from checkpoints import reference, saved
from helpers import assert_within, rms
from test_scripts import run

import minigpt

PROMPTS = [[5, 6, 7, 8, 9], [3, 4], [1, 2, 3]]


@pytest.fixture
def others() -> ModuleType:
    return import_module("bench.others")


@pytest.mark.thorough
def test_it_knows_more_contestants_than_the_package() -> None:
    status, _, err = run("bench/others.py", "--against", "vllm", "--prompt-tokens", 4)
    assert (status, "vllm" in err) == (2, True)
    status, _, err = run("bench/others.py", "--against", "ctranslate2:int4", "--repeats", 1)
    assert status == 2
    assert "No module named 'ctranslate2'" in err or "int4" in err, "its process is started, and says what is missing"


def test_ctranslate2_writes_what_it_is_asked_for(others: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed")
    contestant = others.CTranslate2(str(saved(reference(std=0.3), tmp_path)), PROMPTS, "int8")
    contestant.prefill()
    assert contestant.generate(6) == 3 * 6


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_llama_cpp_computes_our_logits(others: ModuleType, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    model = minigpt.GPT2(minigpt.GPT2Config(vocab_size=300, n_positions=64, n_embd=64, n_layer=2, n_head=4)).eval()
    minigpt.save_pretrained(model, tmp_path)
    contestant = others.LlamaCpp(str(tmp_path), PROMPTS, kind, room=32)
    logits = contestant.prefill()
    with torch.no_grad():
        expected = torch.stack([model(torch.tensor([prompt]))[0, -1] for prompt in PROMPTS])
    assert_within(rms(logits - expected), 2e-2 * rms(expected), rms(expected), f"llama.cpp at {kind}")
    assert contestant.generate(6) == 3 * 6
