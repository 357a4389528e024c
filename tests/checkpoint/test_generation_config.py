"""What a checkpoint's makers wrote beside its weights about how it is to write."""

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import reference
from transformers import GenerationConfig

from minigpt import CheckpointError
from minigpt.checkpoint import read_generation_config
from minigpt.generation.settings import known_settings


def beside(folder: Path, content: Any) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "generation_config.json").write_text(text)
    return folder


def test_settings_are_read_and_what_is_none_is_left_out(tmp_path: Path) -> None:
    fields = {
        "disable_compile": True, "num_assistant_tokens": 20,
        "_from_model_config": True, "bos_token_id": 0, "transformers_version": "5", "pad_token_id": None, "top_k": 0,
        "eos_token_id": [0, 3], "do_sample": True, "temperature": 0.7, "beams": 2, "output_attentions": False,
        "num_beams": 4, "output_scores": True, "min_length": 3,
    }  # fmt: skip
    expected = {
        "eos_token_id": [0, 3], "do_sample": True, "temperature": 0.7, "beams": 2, "num_beams": 4,
        "output_scores": True, "min_length": 3,
    }  # fmt: skip
    assert read_generation_config(beside(tmp_path, fields)) == expected


def test_what_transformers_writes_of_its_own_accord_is_no_setting(tmp_path: Path) -> None:
    GenerationConfig(eos_token_id=3).save_pretrained(tmp_path)
    reference().save_pretrained(tmp_path / "model")
    assert read_generation_config(tmp_path) == {"eos_token_id": 3}
    assert read_generation_config(tmp_path / "model").keys() <= set(known_settings())


def test_beside_a_bare_file(tmp_path: Path) -> None:
    (beside(tmp_path, {"top_p": 0.5}) / "model.safetensors").write_bytes(b"")
    assert read_generation_config(tmp_path / "model.safetensors") == {"top_p": 0.5}


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_file_that_holds_no_settings(tmp_path: Path, content: str) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        read_generation_config(beside(tmp_path, content))
