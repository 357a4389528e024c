"""Checkpoint files -> tensors. Files are mapped into memory, not read; nothing in them is executed."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from minigpt.checkpoint.locate import weight_files
from minigpt.errors import CheckpointError


def read_tensors(place: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint by its name in the file, memory-mapped: its pages are read when first used.

    Raises:
        CheckpointError: no weights, a damaged file, or an index and shards that disagree.
    """
    files = weight_files(place)
    if isinstance(files, list):
        return dict(_tensors(files[0]))
    tensors = {name: (file, tensor) for file in sorted(set(files.values())) for name, tensor in _tensors(file)}
    misplaced = [name for name in files.keys() | tensors.keys() if tensors.get(name, (None,))[0] != files.get(name)]
    if misplaced:
        raise CheckpointError(f"{place}: the index and the shards disagree about {listing(misplaced)}")
    return {name: tensor for name, (_, tensor) in tensors.items()}


def listing(names: Iterable[str], most: int = 8) -> str:
    """ "a, b and 3 more"."""
    names = sorted(name if name.isprintable() else repr(name) for name in names)  # a damaged file's may not be
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  (not a dict)
                yield name, opened.get_tensor(name)
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file} is not a whole safetensors file: {error}") from error
