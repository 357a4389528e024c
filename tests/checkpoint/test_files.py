"""Where a checkpoint lies, and which files of its folder it is: by name or by an index, and never by a guess."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from checkpoints import edit_config, reference, saved, tiny_bpe
from transformers import GPT2LMHeadModel

import minigpt
from minigpt import CheckpointError
from minigpt.checkpoint import Files, local_place
from minigpt.checkpoint.contents import read_stable, unchanged
from minigpt.cli.commands import app_of

pytestmark = pytest.mark.usefixtures("offline")  # a name that should have been refused as a path fails at once


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json and no model\.safetensors$"):
        Files.at(tmp_path).weights()
    saved(reference(), tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors has no config\.json in its folder$"):
        minigpt.from_pretrained(tmp_path / "model.safetensors")


def test_safetensors_go_before_a_pickle_whole_or_sharded(tmp_path: Path) -> None:
    sharded = saved(reference(), tmp_path, max_shard_size="40KB")
    (sharded / "pytorch_model.bin").touch()
    assert Files.at(sharded).weights() == sorted(sharded.glob("model-*.safetensors"))
    (sharded / "model.safetensors").touch()
    assert Files.at(sharded).weights() == [sharded / "model.safetensors"]


def test_weights_of_another_name_are_named_and_not_guessed(tmp_path: Path) -> None:
    (tmp_path / "gpt2-small-124M.pth").touch()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors; to load one of gpt2-small-124M\.pth, give the"):
        Files.at(tmp_path).weights()


@pytest.mark.parametrize("shards", [1, 3])
def test_config_json_may_name_the_weights(shards: int, tmp_path: Path) -> None:
    """As transformers reads it: the file or the index, also beside another model.safetensors."""
    folder = saved(hf_model := reference(), tmp_path, **({} if shards == 1 else {"max_shard_size": "40KB"}))
    name = "model.safetensors" if shards == 1 else "model.safetensors.index.json"
    (folder / name).rename(folder / f"best.{name}")
    saved(reference(seed=1), tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(folder / "model.safetensors")
    edit_config(folder, transformers_weights=f"best.{name}")
    for model in (
        minigpt.from_pretrained(folder, device="cpu").ln_f,
        GPT2LMHeadModel.from_pretrained(folder).transformer.ln_f,
    ):
        assert torch.equal(model.weight, hf_model.transformer.ln_f.weight)


@pytest.mark.parametrize("content", ["{", [], {"metadata": {}}, {"weight_map": {"a": "gone.safetensors"}}], ids=str)
def test_a_bad_index(content: Any, tmp_path: Path) -> None:
    raw = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "model.safetensors.index.json").write_text(raw)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        Files.at(tmp_path).weights()


def test_a_folder_and_a_bare_file_are_themselves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    file = folder / "model.safetensors"
    assert local_place(folder) == local_place(str(folder)) == local_place(f"~/{folder.name}") == folder
    assert local_place(file) == local_place(str(file)) == file
    assert Files.at(folder).folder == Files.at(file).folder == folder
    assert Files.at(folder).config == Files.at(file).config == json.loads((folder / "config.json").read_text())
    assert Files.at(folder).weights() == Files.at(file).weights() == [file]


@pytest.mark.parametrize(
    "source", ["./nothing", "/nothing", "~/nothing", "a/b/c", "nothing.safetensors", "nothing.gguf"]
)
def test_what_can_only_be_a_path_is_not_looked_for_in_the_hub(source: str) -> None:
    with pytest.raises(CheckpointError, match=f"^there is no directory or file of weights {source}$"):
        local_place(source)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.npz").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"model\.npz must be a directory or a \.safetensors, .* file"):
        local_place(tmp_path / "model.npz")


# A folder that is saved to while it is read.


@pytest.mark.parametrize(
    "error", [CheckpointError("the first half does not fit the second"), FileNotFoundError("a folder inside is gone")]
)
def test_what_is_saved_meanwhile_is_read_again(error: Exception, tmp_path: Path) -> None:
    """So that config, tokenizer and weights come of one save."""
    folders = {seed: saved(reference(seed=seed), tmp_path / str(seed)) for seed in (0, 1)}
    model, states = minigpt.from_pretrained(folders[1], device="cpu"), []

    def read(files: Files) -> float:
        states.append(files.config)
        if len(states) == 1:
            minigpt.save_pretrained(model, folders[0])
            raise error
        return files.tensors()[0]["transformer.ln_f.weight"][0].item()

    assert read_stable(folders[0], read) == model.ln_f.weight[0].item()
    assert len(states) == 2


@pytest.mark.parametrize("ends", ["well", "with an error"])
def test_what_may_not_change_while_it_is_read_says_so(ends: str, tmp_path: Path) -> None:
    folder = saved(reference(), tmp_path)
    with unchanged(folder):
        (folder / "train.log").write_text("is no part of it")
    with pytest.raises(OSError, match="gone"), unchanged(folder):
        raise OSError("gone")

    def save() -> None:
        minigpt.save_pretrained(minigpt.from_pretrained(folder), folder)
        if ends != "well":
            raise OSError("a file is gone")

    with pytest.raises(CheckpointError, match="was saved to while it was read"), unchanged(folder):
        save()


def test_a_prompt_reads_each_file_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """config.json, generation_config.json and the tokenizer. The place is found once, and settings are checked once."""
    folder = saved(reference(vocab_size=300), tmp_path)
    minigpt.Tokenizer(tiny_bpe()).save(folder)
    reads: list[str] = []
    watched = str(folder)

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if watched and event == "open" and str(arguments[0]).startswith(watched):
            reads.append(Path(arguments[0]).name)

    def find(*words: Any, **options: Any) -> Path:
        reads.append("place")
        return local_place(*words, **options)

    def parse(file: str) -> tokenizers.Tokenizer:
        reads.append(Path(file).name)
        return from_file(file)

    from_file = tokenizers.Tokenizer.from_file
    monkeypatch.setattr("minigpt.checkpoint.local_place", find)
    monkeypatch.setattr("tokenizers.Tokenizer.from_file", parse)
    sys.addaudithook(note)
    assert not app_of(["generate"])(
        ["generate", "the", "--model", watched, "--max-new-tokens", "2"], standalone_mode=False
    )
    watched = ""
    names = ("place", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    assert {name: reads.count(name) for name in names} == dict.fromkeys(names, 1)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_generation_config_that_holds_no_settings(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        Files.at(tmp_path).generation_fields()
