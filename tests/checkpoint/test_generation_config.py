"""What a checkpoint's makers wrote beside its weights about how it is to write."""

from pathlib import Path

import pytest
from transformers import GenerationConfig

from minigpt import CheckpointError
from minigpt.checkpoint import Files
from minigpt.cli.generate import settings_in


def test_settings_are_read_and_what_is_none_is_left_out() -> None:
    bookkeeping = {
        "disable_compile": True,
        "use_cache": True,
        "num_assistant_tokens": 20,
        "_from_model_config": True,
        "bos_token_id": 0,
    }
    off = {"pad_token_id": None, "top_k": 0, "output_attentions": False, "length_penalty": 1.0, "min_length": 0}
    settings = {
        "eos_token_id": [0, 3], "do_sample": True, "temperature": 1.0, "seed": 0, "beams": 2, "num_beams": 4,
        "output_scores": True, "remove_invalid_values": True, "min_length": 3,
    }  # fmt: skip
    assert settings_in(bookkeeping | off | settings) == settings


def test_what_transformers_writes_of_its_own_accord_is_no_setting(tmp_path: Path) -> None:
    """Also beside a bare file."""
    GenerationConfig(eos_token_id=3).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    for place in (tmp_path, tmp_path / "model.safetensors"):
        assert settings_in(Files.at(place).generation_fields()) == {"eos_token_id": 3}


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_file_that_holds_no_settings(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        Files.at(tmp_path).generation_fields()
