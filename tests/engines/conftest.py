"""What tests of engines start from: a GPT-2 of two layers, and the original that its files are judged against."""

from pathlib import Path

import pytest
from checkpoints import reference, saved
from judgements import PROMPTS
from transformers import GPT2LMHeadModel

import minigpt


@pytest.fixture(scope="session")
def hf_model() -> GPT2LMHeadModel:
    return reference(std=0.3)


@pytest.fixture(scope="session")
def folder(hf_model: GPT2LMHeadModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(hf_model, tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="session")
def original(folder: Path) -> minigpt.Original:
    return minigpt.Original(folder, prompts=PROMPTS, max_new_tokens=4, device="cpu")
