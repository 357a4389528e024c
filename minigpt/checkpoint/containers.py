"""Files that hold tensors: safetensors, PyTorch's pickles and NumPy archives. Reading one never runs what is in it."""

import dataclasses
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from minigpt.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class Contents:
    """What a file holds.

    Attributes:
        tensors: on the CPU, by their names in the file.
        fields: the config, if the file carries one.
    """

    tensors: dict[str, Tensor]
    fields: Mapping[str, Any] | None = None


def read_file(file: Path) -> Contents:
    """Return the tensors of a file. They are mapped into memory where the format allows, and read when first used.

    Raises:
        CheckpointError: if the file is damaged, or holds more than tensors.
    """
    try:
        return READERS[file.suffix](file)
    except Exception as error:  # each library raises its own kinds
        # torch.load also says how to run the file without restrictions. Keep only what it found.
        reason = str(error).partition("WeightsUnpickler error:")[2].partition("Please use")[0] or str(error)
        raise CheckpointError(f"{file} cannot be read as a {file.suffix} file: {' '.join(reason.split())}") from error


def read_safetensors(file: Path) -> Contents:
    """Return every tensor of a safetensors file, mapped into memory."""
    with safe_open(file, framework="pt") as opened:
        return Contents({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118  (not a dict)


def read_npz(file: Path) -> Contents:
    """Return every array of a NumPy archive as a tensor."""
    with np.load(file, allow_pickle=False) as archive:
        return Contents({name: torch.from_numpy(archive[name]) for name in archive.files})


def read_pickle(file: Path) -> Contents:
    """Return the tensors of a state dict, or of a trainer's checkpoint that holds one.

    ``torch.load(weights_only=True)`` reads the pickle. It builds tensors and plain containers, and calls nothing else.
    """
    loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    if not isinstance(loaded, Mapping):
        raise ValueError(f"it must hold a state dict, got a {type(loaded).__name__}")
    nested = ("model", "model_state_dict", "state_dict")  # where trainers keep the weights beside their own state
    state = next((loaded[name] for name in nested if isinstance(loaded.get(name), Mapping)), loaded)
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            raise ValueError(f"{name!r} must be a plain tensor, got a {type(value).__name__}")
    return Contents({name: value.detach() for name, value in state.items()}, loaded.get("model_args"))  # as nanoGPT


READERS: dict[str, Callable[[Path], Contents]] = {
    ".safetensors": read_safetensors,
    ".bin": read_pickle,
    ".pt": read_pickle,
    ".pth": read_pickle,
    ".npz": read_npz,
}
