"""Checkpoint files -> tensors. Files are mapped into memory, not read; nothing in them is executed."""

from pathlib import Path

from torch import Tensor

from minigpt.checkpoint.containers import READERS, Contents
from minigpt.checkpoint.files import weight_files
from minigpt.errors import CheckpointError, listing


def read_tensors(place: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint by its name in the file, memory-mapped where the file can be.

    Raises:
        CheckpointError: no weights, a damaged or a hostile file, or an index and shards that disagree.
    """
    return read_contents(place).tensors


def read_contents(place: Path) -> Contents:
    """The tensors, pages of which are read when first used, and what the file says of their model's shape.

    An .npz and files that PyTorch wrote before 1.6 cannot be mapped and are read.

    Raises:
        CheckpointError: no weights, a damaged or a hostile file, or an index and shards that disagree.
    """
    files = weight_files(place)
    if isinstance(files, list):
        return READERS[files[0].suffix](files[0])
    shards = sorted(set(files.values()))
    tensors = {name: (file, tensor) for file in shards for name, tensor in READERS[file.suffix](file).tensors.items()}
    misplaced = [name for name in files.keys() | tensors.keys() if tensors.get(name, (None,))[0] != files.get(name)]
    if misplaced:
        raise CheckpointError(f"{place}: the index and the shards disagree about {listing(misplaced)}")
    return Contents({name: tensor for name, (_, tensor) in tensors.items()})
