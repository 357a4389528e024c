"""Checkpoint files to tensors: mapped into memory, not read, and a damaged file is one clear error."""

import sys
from pathlib import Path

import pytest
import torch
from checkpoints import reference, saved
from safetensors.torch import load_file
from torch import Tensor

from minigpt import CheckpointError
from minigpt.checkpoint import read_tensors
from minigpt.errors import listing


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(reference(), tmp_path_factory.mktemp("single"))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return saved(reference(), tmp_path / "sharded", max_shard_size="40KB")


def mapped_ranges(file: Path) -> list[range]:
    """The addresses at which this process has ``file`` mapped."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [line[0].split("-") for line in lines if line[-1] == str(file.resolve())]
    return [range(int(start, 16), int(end, 16)) for start, end in spans]


def lies_in(tensor: Tensor, ranges: list[range]) -> bool:
    return any(tensor.data_ptr() in addresses for addresses in ranges)


def test_every_tensor_comes_as_it_was_saved(folder: Path) -> None:
    expected = load_file(folder / "model.safetensors")
    for place in (folder, folder / "model.safetensors"):
        tensors = read_tensors(place)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_shards_come_as_one(folder: Path, sharded: Path) -> None:
    whole, parts = read_tensors(folder), read_tensors(sharded)
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/maps")
@pytest.mark.parametrize("shards", [False, True])
def test_tensors_are_the_mapped_file(folder: Path, sharded: Path, shards: bool) -> None:
    place = sharded if shards else folder
    tensors = read_tensors(place)
    ranges = [addresses for file in place.glob("*.safetensors") for addresses in mapped_ranges(file)]
    outside = [name for name, tensor in tensors.items() if not lies_in(tensor, ranges)]
    assert not outside, f"copied out of the file: {outside}"
    assert all(tensor.is_contiguous() for tensor in tensors.values())


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"])
def test_a_file_that_is_not_safetensors(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read as a \.safetensors file: \S"):
        read_tensors(tmp_path)


def test_every_truncation_is_refused(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    for number, size in enumerate([0, 7, 8, 100, len(whole) // 2, len(whole) - 1]):
        file = tmp_path / f"{number}.safetensors"
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cannot be read as a \.safetensors file"):
            read_tensors(file)


def test_a_damaged_shard_is_named(sharded: Path) -> None:
    last = sorted(sharded.glob("model-*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=rf"{last.name} cannot be read"):
        read_tensors(sharded)


def test_listing_is_sorted_and_counts_the_rest() -> None:
    assert listing(["b", "a"]) == "a, b"
    assert listing(map(str, range(11))) == "0, 1, 10, 2, 3, 4, 5, 6 and 3 more"
    assert listing(["two\nlines"]) == "'two\\nlines'"
    assert listing([]) == ""
