"""Damaged files, and files made to harm their reader: nothing in them runs, and each is refused with one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import reference, saved
from foreign import write_openai, write_pickle

import minigpt
from minigpt import CheckpointError, MiniGPTError
from minigpt.checkpoint import read_tensors
from minigpt.report.describe import describe


def refusal(place: Path) -> str:
    with pytest.raises(MiniGPTError) as raised:
        minigpt.from_pretrained(place, device="cpu")
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    return write_pickle(reference(), tmp_path / "model")


class Canary:
    """Writes a file if its pickle is loaded by a reader that runs what it reads."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return eval, (f"open({str(self.path)!r}, 'w').close()",)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "ckpt.pt"])
def test_a_pickle_never_runs(pickled: Path, legacy: bool, name: str) -> None:
    canary = pickled / "canary"
    (pickled / "pytorch_model.bin").unlink()
    content = {"model": {"wte.weight": torch.ones(2)}, "model_args": Canary(canary)}
    torch.save(content, pickled / name, _use_new_zipfile_serialization=not legacy)
    for said in (refusal(pickled), describe(pickled)["refused"][0]):
        assert "eval" in said
        assert "weights_only" not in said, "the library's advice is to run it after all"
    assert not canary.exists()
    torch.load(pickled / name, weights_only=False)
    assert canary.exists(), "the canary works"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ([torch.ones(2)], "it must hold a state dict, got a list"),
        ({"wte.weight": torch.ones(2).to_sparse()}, "'wte.weight' must be a plain tensor"),
        ({"wte.weight": 3}, "'wte.weight' must be a plain tensor, got a int"),
    ],
    ids=["list", "sparse", "number"],
)
def test_pickles_of_something_else(pickled: Path, content: Any, complaint: str) -> None:
    torch.save(content, pickled / "pytorch_model.bin")
    assert complaint in refusal(pickled)


def test_arrays_of_objects_are_not_read(tmp_path: Path) -> None:
    npz = write_openai(reference(), tmp_path)
    np.savez(npz, **{"model/wte": np.array([Canary(tmp_path / "canary")], dtype=object)})
    assert "Object arrays cannot be loaded" in refusal(npz)
    assert not (tmp_path / "canary").exists()


def test_an_index_that_leads_outside(tmp_path: Path) -> None:
    folder = saved(reference(), tmp_path / "model", max_shard_size="40KB")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shard = min(folder.glob("model-*.safetensors"))
    (tmp_path / shard.name).write_bytes(shard.read_bytes())
    for outside in (f"../{shard.name}", str(tmp_path / shard.name), f"sub/../../{shard.name}"):
        moved = {name: outside if file == shard.name else file for name, file in content["weight_map"].items()}
        index.write_text(json.dumps({"weight_map": moved}))
        assert "which is not a file beside it" in refusal(folder)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    folder = saved(reference(), tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    for number, size in enumerate([0, 7, 8, 100, len(whole) // 2, len(whole) - 1]):
        file = tmp_path / f"{number}.safetensors"
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cannot be read as a \.safetensors file"):
            read_tensors(file)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", '{"model": null}'),
        ("tokenizer.json", '{"model": {"vocab": 3}}'),
        ("tokenizer.json", '{"added_tokens": [3]}'),
        ("vocab.json", '{"a": "b"}'),
    ],
)
def test_a_tokenizer_s_file_without_ids_is_refused(tmp_path: Path, name: str, content: str) -> None:
    place = saved(reference(), tmp_path / "model")
    (place / name).write_text(content)
    assert refusal(place).startswith(f"{place / name} is not a tokenizer's file")
