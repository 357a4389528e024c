"""Models whose weights stay in their files have the bits of the same models in memory, and leave nothing behind."""

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import random_model
from helpers import assert_same_bits
from torch import Tensor

import minigpt
from minigpt.checkpoint.offloading import (
    WatchedWeights,
    device_map_of,
    free_memory,
    may_take,
)
from minigpt.checkpoint.transformers_model import is_on_disk, load_with_transformers
from minigpt.choices import bytes_of
from minigpt.host import host_of
from minigpt.offload import is_offloaded
from minigpt.precision import Float64

IDS = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(1))
QUICK = ["mixtral"]
OTHERS = [
    "llama",
    "gemma",
    "gpt2",
    "qwen2_moe",
    "qwen3",
    "pythia",
    "bloom",
    "phi",
    "falcon",
    "mamba",
    "deepseek_v3",
    "cohere",
    "opt",
]


@contextlib.contextmanager
def exactly() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        with Float64():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(IDS, use_cache=False).logits


def opened(folder: Path, dtype: torch.dtype, memory: Any) -> Any:
    return load_with_transformers(folder, dtype=dtype, memory=memory)


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.thorough) for name in OTHERS)])
@pytest.mark.parametrize("saved", [pytest.param(torch.float32, marks=pytest.mark.thorough), torch.bfloat16], ids=str)
def test_weights_in_files_have_the_bits_of_weights_in_memory(name: str, saved: torch.dtype, tmp_path: Path) -> None:
    random_model(name).to(saved).save_pretrained(tmp_path)
    dtype = torch.bfloat16  # to which weights of float32 are rounded
    in_memory, on_disk = opened(tmp_path, dtype, "1TB"), opened(tmp_path, dtype, 0)
    assert not is_on_disk(in_memory)
    assert is_on_disk(on_disk)
    assert_same_bits(logits(on_disk), logits(in_memory), f"{name} at {dtype}")
    for model in (in_memory, on_disk):
        model.double()  # of weights in files: each as it is read
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")
    with exactly():
        assert_same_bits(logits(on_disk), logits(in_memory), f"{name} in float64")
        assert logits(on_disk).dtype == torch.float64


def test_what_from_pretrained_keeps_wider_stays_so(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    model = opened(tmp_path, torch.float16, 0)
    assert model.dtype == torch.float16
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_norms_are_in_memory_and_matrices_are_not(tmp_path: Path) -> None:
    random_model("qwen3").save_pretrained(tmp_path)
    model = opened(tmp_path, torch.float32, 0)
    host = host_of(model)
    assert not any(map(is_offloaded, host.norms().values()))
    assert is_offloaded(model.lm_head)
    assert (host.device.type, host.dtype) == ("cpu", torch.float32)
    before = logits(model)
    minigpt.swap_norms(model, "rms")
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-5)


def test_the_folder_for_weights_goes_with_the_model(tmp_path: Path, temporary: Path) -> None:
    random_model("mixtral").save_pretrained(tmp_path / "model")
    model = opened(tmp_path / "model", torch.float32, 0)
    assert len([*(tmp_path / "temp").rglob("*.safetensors")]) == 4  # experts, as their modules have them
    del model
    gc.collect()
    assert not [*(tmp_path / "temp").iterdir()]


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    model = opened(tmp_path, torch.float32, 0)
    logits(model)
    file = tmp_path / "model.safetensors"
    os.utime(file, (1, 1))
    with pytest.raises(minigpt.CheckpointError, match=r"model\.safetensors was written to while it was read"):
        logits(model)


def test_a_file_that_changes_as_it_is_read_is_an_error(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"

    class ChangesTheFile(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            os.utime(file, (1, 1))
            raise KeyError(name)  # as a file that is cut off

    weights = WatchedWeights(ChangesTheFile(), [file])
    with pytest.raises(minigpt.CheckpointError, match=r"model\.safetensors was written to while it was read"):
        weights["a.weight"]


def test_a_tied_weight_that_is_listed_once_is_read_under_both_names() -> None:
    """As transformers below 5.13 lists it."""
    embedding, other = torch.ones(3), torch.zeros(3)
    weights = WatchedWeights({"embedding": embedding}, [], {"head": "embedding"})
    assert weights["head"] is weights["embedding"] is embedding
    whole = WatchedWeights({"embedding": embedding, "head": other}, [], {"head": "embedding"})
    assert whole["head"] is other


def test_the_cpu_holds_what_there_is_room_for_beside_a_gpu() -> None:
    model = random_model("llama", tie_word_embeddings=True)
    embedding = model.model.embed_tokens.weight.nbytes
    gpu = torch.device("cuda:0")
    assert {*device_map_of(model, gpu).values()} == {"cuda:0", "disk"}
    assert {*device_map_of(model, gpu, 2**30).values()} == {"cuda:0", "cpu"}
    places = device_map_of(model, gpu, embedding)
    assert (places["model.embed_tokens"], places["lm_head"]) == ("cpu", "cpu")  # one matrix
    assert places["model.norm"] == "cuda:0"
    assert places["model.layers.0.mlp.up_proj"] == "disk"


def test_a_model_larger_than_the_memory_stays_on_disk(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    size = sum(parameter.numel() for parameter in random_model("llama").parameters())
    for memory, itemsize, stays in ((size * 4, None, False), (size * 4 - 1, None, True), (size * 4, 8, True)):
        model = load_with_transformers(tmp_path, dtype=torch.float32, memory=memory, itemsize=itemsize)
        assert is_on_disk(model) == stays
    assert not is_on_disk(load_with_transformers(tmp_path))


@pytest.mark.parametrize(
    ("memory", "expected"), [("8GB", 8e9), ("1.5 gb", 1.5e9), ("500MiB", 500 * 2**20), ("12 B", 12), ("0", 0), (7, 7)]
)
def test_sizes(memory: str | int, expected: float) -> None:
    assert bytes_of(memory) == may_take(memory, torch.device("cpu")) == expected


@pytest.mark.parametrize("memory", ["8 apples", "8", 1.5, "", "-1GB", -1, True, "GB"])
def test_what_is_no_size_is_refused(memory: Any) -> None:
    with pytest.raises(minigpt.ConfigError, match="must be a size, as 8GB or 500MiB"):
        bytes_of(memory)


def test_free_memory_is_that_of_the_machine_or_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = free_memory(torch.device("cpu"))
    assert 2**28 < free < 2**50
    monkeypatch.setattr("minigpt.checkpoint.offloading.GROUP", tmp_path)
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    assert free_memory(torch.device("cpu")) == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(torch.device("cpu")) > 2**28
