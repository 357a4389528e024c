"""Where a checkpoint lies: folders, bare files, indices, and names that are none of these."""

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import reference, saved

from minigpt import CheckpointError
from minigpt.checkpoint.locate import DEMO, config_file, locate, weight_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(reference(), tmp_path_factory.mktemp("single"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return saved(reference(), tmp_path / "sharded", max_shard_size="40KB")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that should have been refused as a path fails here with the hub's message, and not after a look-up."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_a_folder_and_a_bare_file_are_themselves(folder: Path) -> None:
    file = folder / "model.safetensors"
    assert locate(folder) == locate(str(folder)) == folder
    assert locate(file) == locate(str(file)) == file
    assert config_file(folder) == config_file(file) == folder / "config.json"
    assert weight_files(folder) == weight_files(file) == [file]


def test_demo_is_the_bundled_folder() -> None:
    assert locate("demo") == DEMO


def test_a_home_relative_path_is_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert locate(f"~/{folder.name}") == folder


def test_a_folder_in_the_working_directory_needs_no_dot(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert locate(folder.name).resolve() == folder.resolve()


@pytest.mark.parametrize(
    "source",
    [
        "./nothing",
        "../nothing",
        "/nothing/here",
        "~/nothing",
        "~nosuchuser/nothing",
        "a/b/c",
        "nothing.safetensors",
        "",
        "nothing/" + "x" * 5000,
        "x" * 300,
        "nul\0byte",
        "two words",
        "bad--name",
        "-bad",
        Path("nothing/here"),
    ],
    ids=lambda source: repr(source)[:24],
)
def test_a_source_that_is_nothing_is_one_sentence(source: str | Path) -> None:
    with pytest.raises(CheckpointError) as raised:
        locate(source)
    message = str(raised.value)
    assert "\n" not in message
    if isinstance(source, Path):
        assert "offline mode" not in message, "a Path is a path and never a repository's name"


def test_an_empty_source_is_not_the_working_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(CheckpointError):
        locate("")


def test_an_unknown_name_lists_the_known_ones_and_the_way_out() -> None:
    with pytest.raises(CheckpointError, match=r"'gpt3'.*local folder.*demo, gpt2, gpt2-medium.*needs no network"):
        locate("gpt3")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"model\.gguf is neither a directory nor a \.safetensors file"):
        locate(tmp_path / "model.gguf")


def test_a_dangling_link_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="there is no"):
        locate(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        weight_files(tmp_path)


def test_no_config(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"has no config\.json$"):
        config_file(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors has no config\.json beside it$"):
        config_file(tmp_path / "model.safetensors")


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors$"):
        weight_files(tmp_path)


def test_only_a_pickle_is_named_and_not_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"only a pytorch_model\.bin, which is not read; save it again"):
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
