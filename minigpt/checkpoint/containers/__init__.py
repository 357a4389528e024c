"""Files that hold tensors, one kind a file: read without running anything that is in them."""

from collections.abc import Callable
from pathlib import Path

from minigpt.checkpoint.containers.contents import Contents
from minigpt.checkpoint.containers.npz import read_npz
from minigpt.checkpoint.containers.pickled import read_pickled
from minigpt.checkpoint.containers.safe import read_safetensors

READERS: dict[str, Callable[[Path], Contents]] = {
    ".safetensors": read_safetensors,
    ".bin": read_pickled,
    ".pt": read_pickled,
    ".pth": read_pickled,
    ".npz": read_npz,
}

__all__ = ["READERS", "Contents"]
