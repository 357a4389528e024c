"""Pages of mapped files are given back, their values are not; and memory that is no file's is left alone."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import minigpt
from minigpt.checkpoint.files import read_tensors
from minigpt.engine.layout import lay_by_rows
from minigpt.engine.pages import MAPS, MappedFiles

SIZE = 1_000_000  # of a tensor, in bytes
SLACK = 3 * 4096  # its first and its last page, which it may share with others, and one more

needs_maps = pytest.mark.skipif(not MAPS.exists(), reason="only Linux tells what is mapped")


def pickled(tensors: dict[str, Tensor], file: Path) -> None:
    torch.save(tensors, file.with_suffix(".bin"))


KINDS: dict[str, Callable[[dict[str, Tensor], Path], None]] = {".safetensors": save_file, ".bin": pickled}


@pytest.fixture(params=KINDS)
def mapped(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], Path]:
    """Tensors, the same as they lie in a file, and that file."""
    values = {name: torch.randn(SIZE // 4) for name in ("before", "it", "behind")}
    file = tmp_path / f"weights{request.param}"
    KINDS[request.param](values, file)
    return values, read_tensors(file), file


def resident(file: Path) -> int:
    """Bytes of the mapped file that are in this process's memory."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if line.endswith(str(file)))
    return 1024 * next(int(line.split()[1]) for line in lines[at:] if line.startswith("Rss:"))


@needs_maps
def test_a_copied_tensor_s_pages_and_no_others_are_given_back(
    mapped: tuple[dict[str, Tensor], dict[str, Tensor], Path],
) -> None:
    values, tensors, file = mapped
    assert all(torch.equal(tensors[name], values[name]) for name in values)  # every page has been looked at
    before = resident(file)
    MappedFiles().give_back(tensors["it"], tensors["it"].clone())
    print(f"{before:,} bytes before, {resident(file):,} behind, {SIZE:,} copied")
    assert before >= 3 * SIZE
    assert before - SIZE <= resident(file) <= before - SIZE + SLACK
    assert all(torch.equal(tensors[name], values[name]) for name in values)


@needs_maps
@pytest.mark.parametrize("same", [lambda tensor: tensor, lambda tensor: tensor.view(2, -1).t()], ids=["itself", "view"])
def test_what_was_not_copied_stays(
    mapped: tuple[dict[str, Tensor], dict[str, Tensor], Path], same: Callable[[Tensor], Tensor]
) -> None:
    values, tensors, file = mapped
    assert torch.equal(tensors["it"], values["it"])
    before = resident(file)
    MappedFiles().give_back(tensors["it"], same(tensors["it"]))
    assert resident(file) == before


@needs_maps
def test_what_was_written_to_a_file_s_memory_stays(
    mapped: tuple[dict[str, Tensor], dict[str, Tensor], Path],
) -> None:
    _, tensors, _ = mapped
    tensors["it"][12345] = 7
    wanted = tensors["it"].clone()
    MappedFiles().give_back(tensors["it"])
    assert torch.equal(tensors["it"], wanted)


def test_another_system_is_asked_for_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_library(name: str | None) -> None:
        raise TypeError(f"bad argument type: {name}")

    monkeypatch.setattr("minigpt.engine.pages.MAPS", tmp_path / "nothing")
    monkeypatch.setattr("ctypes.CDLL", no_library)
    model = minigpt.from_pretrained("demo", device="cpu")
    lay_by_rows(model)


@pytest.mark.parametrize("size", [0, 1, 4096, SIZE])
def test_memory_that_is_no_file_s_keeps_what_it_holds(size: int) -> None:
    tensor = torch.randn(size)
    copy = tensor.clone()
    MappedFiles().give_back(tensor, copy)
    MappedFiles().give_back(tensor, copy.to("meta"))
    assert torch.equal(tensor, copy)
