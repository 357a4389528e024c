"""Which files of a folder are the checkpoint: by name, by an index that stays inside, and never by a guess."""

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import reference, saved

from minigpt import CheckpointError
from minigpt.checkpoint.files import config_file, weight_files


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return saved(reference(), tmp_path / "sharded", max_shard_size="40KB")


def test_no_config(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"has no config\.json$"):
        config_file(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors has no config\.json beside it$"):
        config_file(tmp_path / "model.safetensors")


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json and no model\.safetensors$"):
        weight_files(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "ckpt.pt"])
def test_the_names_that_a_folder_s_weights_may_have(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert weight_files(tmp_path) == [tmp_path / name]


def test_safetensors_go_before_a_pickle_whole_or_sharded(sharded: Path) -> None:
    (sharded / "pytorch_model.bin").touch()
    assert weight_files(sharded) == sorted(sharded.glob("model-*.safetensors"))
    (sharded / "model.safetensors").touch()
    assert weight_files(sharded) == [sharded / "model.safetensors"]


def test_weights_of_another_name_are_named_and_not_guessed(tmp_path: Path) -> None:
    (tmp_path / "gpt2-small-124M.pth").touch()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors; to load one of gpt2-small-124M\.pth, give the"):
        weight_files(tmp_path)


@pytest.mark.parametrize("content", ["{", [], {"metadata": {}}, {"weight_map": {"a": "gone.safetensors"}}], ids=str)
def test_a_bad_index(content: Any, tmp_path: Path) -> None:
    raw = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "model.safetensors.index.json").write_text(raw)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        weight_files(tmp_path)
