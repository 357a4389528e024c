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
    assert isinstance(weight_files(sharded), dict)
    (sharded / "model.safetensors").touch()
    assert weight_files(sharded) == [sharded / "model.safetensors"]


def test_weights_of_another_name_are_named_and_not_guessed(tmp_path: Path) -> None:
    (tmp_path / "gpt2-small-124M.pth").touch()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors; give the file itself .*gpt2-small-124M\.pth$"):
        weight_files(tmp_path)


def test_shards_are_found_by_their_index(sharded: Path) -> None:
    files = weight_files(sharded)
    assert isinstance(files, dict)
    assert len(set(files.values())) > 2
    assert {file.parent for file in files.values()} == {sharded}
    assert files["transformer.wte.weight"].is_file()


BAD_INDICES: dict[str, Any] = {
    "garbage": "{",
    "empty": "",
    "not UTF-8": b"\xff\xfe\x00",
    "deep": "[" * 100_000,
    "a list": [],
    "null": None,
    "no map": {"metadata": {}},
    "a list for a map": {"weight_map": []},
    "null for a map": {"weight_map": None},
    "a number for a file": {"weight_map": {"wte.weight": 3}},
    "null for a file": {"weight_map": {"wte.weight": None}},
    "the folder itself": {"weight_map": {"wte.weight": ""}},
    "the folder above": {"weight_map": {"wte.weight": ".."}},
    "a file above": {"weight_map": {"wte.weight": "../outside.safetensors"}},
    "a file above by a detour": {"weight_map": {"wte.weight": "sub/../../outside.safetensors"}},
    "a file in a folder": {"weight_map": {"wte.weight": "sub/inside.safetensors"}},
    "an absolute path": {"weight_map": {"wte.weight": "/outside.safetensors"}},
    "a pickle": {"weight_map": {"wte.weight": "pytorch_model.bin"}},
    "a missing shard": {"weight_map": {"wte.weight": "model-00009-of-00009.safetensors"}},
    "a NUL byte": {"weight_map": {"wte.weight": "a\0b.safetensors"}},
    "a tensor twice": '{"weight_map": {"wte.weight": "a.safetensors", "wte.weight": "b.safetensors"}}',
    "a line break": {"weight_map": {"wte.weight": "a\nb.safetensors"}},
    "an endless name": {"weight_map": {"wte.weight": "x" * 5000 + ".safetensors"}},
}


@pytest.mark.parametrize("content", BAD_INDICES.values(), ids=BAD_INDICES)
def test_a_bad_index_is_one_sentence(content: Any, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    (folder / "sub").mkdir(parents=True)
    for file in ("outside.safetensors", "checkpoint/sub/inside.safetensors", "checkpoint/pytorch_model.bin"):
        (tmp_path / file).touch()
    raw = content if isinstance(content, str | bytes) else json.dumps(content)
    (folder / "model.safetensors.index.json").write_bytes(raw.encode() if isinstance(raw, str) else raw)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json") as raised:
        weight_files(folder)
    assert "\n" not in str(raised.value)


def test_an_index_names_the_missing_shard(sharded: Path) -> None:
    gone = next(iter(sorted(sharded.glob("model-*.safetensors"))))
    gone.unlink()
    with pytest.raises(CheckpointError, match=rf"names '{gone.name}', which is not there"):
        weight_files(sharded)


def test_a_link_out_of_the_folder_is_refused(sharded: Path, tmp_path: Path) -> None:
    shard = min(sharded.glob("model-*.safetensors"))
    shard.rename(tmp_path / "outside.safetensors")
    shard.symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(CheckpointError, match=rf"names '{shard.name}', which is a link to a file outside its folder"):
        weight_files(sharded)


def test_links_into_the_hub_s_own_cache_are_how_it_works(sharded: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(sharded.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    files = weight_files(snapshot)
    assert isinstance(files, dict)
    assert {file.parent for file in files.values()} == {snapshot}
