"""NumPy's .npz: a zip archive of arrays. Nothing pickled in it is read."""

import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minigpt.checkpoint.containers.contents import Contents
from minigpt.checkpoint.containers.zipped import require_sound
from minigpt.errors import CheckpointError


def read_npz(file: Path) -> Contents:
    """Every array of the archive, as a tensor.

    Raises:
        CheckpointError: it is no whole archive of plain arrays, or unpacks to more than twice its size.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            require_sound(archive, file.stat().st_size, most_growth=2)
        with np.load(file, allow_pickle=False) as archive:
            return Contents({name: _tensor(name, archive[name]) for name in archive.files})
    except Exception as error:  # zipfile's, zlib's and NumPy's many kinds
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"{file} is not a whole .npz archive of arrays: {reason[:300]}") from error


def _tensor(name: str, array: object) -> Tensor:
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{name!r} in it is no array")
    return torch.from_numpy(np.ascontiguousarray(array) if array.ndim else array)
