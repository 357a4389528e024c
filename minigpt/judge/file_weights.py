"""The weights in another program's file: dequantized, and by the names that the original's tensors have."""

from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from minigpt.checkpoint.contents import is_gguf, local_place, read_stable
from minigpt.checkpoint.pretrained import tensors_of
from minigpt.errors import CheckpointError


class FileWeights(NamedTuple):
    """The weights in another program's file.

    Attributes:
        place: what minigpt opens as a checkpoint with these weights, in float32: the GGUF file, or a folder.
        tensors: in float32, by the names and in the layouts that ``tensors_of`` gives of a checkpoint.
        types: how the file stores each tensor, as "Q4_K" or "int8".
        strange: a sentence on each tensor that is not the original's, or has no partner there.
    """

    place: Path
    tensors: dict[str, Tensor]
    types: dict[str, str]
    strange: list[str]


def weights_of(file: str | Path, original: str | Path | None = None) -> FileWeights:
    """Return the weights in a file of llama.cpp.

    Args:
        original: the checkpoint that the file was made of, with which the tensors are compared.

    Raises:
        ConfigError: if the package that reads such a file is not installed.
        CheckpointError: if the file or the original cannot be read.
    """
    place = local_place(file)
    if not is_gguf(place):
        raise CheckpointError(f"{file} must be a GGUF file")
    from minigpt.checkpoint.gguf import types_of

    return FileWeights(place, read_stable(place, tensors_of), types_of(place), [])
