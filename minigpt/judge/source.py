"""A checkpoint before anything is read with it: its sizes, the sites of its norms, its dtype."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minigpt.checkpoint import Files
from minigpt.checkpoint.contents import State, files_state, read_stable
from minigpt.checkpoint.norms import PLAIN_FORM, PLAIN_NORM
from minigpt.checkpoint.offloading import why_whole
from minigpt.checkpoint.read import only_dtype, read_checkpoint
from minigpt.checkpoint.transformers_model import load_with_transformers
from minigpt.choices import human_size
from minigpt.config import site_names
from minigpt.errors import CheckpointError
from minigpt.host import Shape, host_of
from minigpt.norms import is_exact
from minigpt.precision import resolve_dtype
from minigpt.report.fields import OWN_NORM


@dataclass(eq=False)
class Source:
    """The contents of a checkpoint.

    Attributes:
        place: its folder or file.
        state: of its files, before they were read.
        is_gpt2: whether it is a GPT-2; transformers opens any other architecture.
        shape: its sizes, with the whole vocabulary, padding included.
        sites: the paths of its norms.
        dtype: the one that is asked for, else that of its weights.
        weights: how many numbers it has.
        norm: the norm that transformers computes: "frozen" for the plain form of frozen norms, else "fused".
        tensors: of a GPT-2, by their names in the files; None once they are taken.
        memory: the bytes that a model may take; None if nobody has looked yet.
        why_whole: why its weights cannot stay in their files, in words; None if they can.
    """

    place: Path
    state: State
    is_gpt2: bool
    shape: Shape
    sites: list[str]
    dtype: torch.dtype
    weights: int
    norm: str
    tensors: dict[str, Tensor] | None = None
    memory: int | None = None
    why_whole: str | None = None

    def may_take(self, memory: int, free: int) -> None:
        """Set the bytes that a model may take. Its tensors are not kept if the weights stay in their files.

        Args:
            free: the bytes that are free.

        Raises:
            CheckpointError: if it takes more than is free, and its weights cannot stay in their files.
        """
        self.memory = memory
        if self.is_too_large:
            require_room(str(self.place), self.size, free, self.why_whole)
        if self.offload:
            self.tensors = None

    @property
    def size(self) -> int:
        """The bytes of the weights in float64."""
        return self.weights * torch.float64.itemsize

    @property
    def is_too_large(self) -> bool:
        """Whether the weights take more in float64 than they may."""
        return self.memory is not None and self.size > self.memory

    @property
    def offload(self) -> bool:
        """Whether the weights stay in their files, since they are too large, and can stay there."""
        return self.is_too_large and self.why_whole is None

    def take_tensors(self) -> dict[str, Tensor] | None:
        """Return the tensors that were read when the checkpoint was opened, and keep them no longer."""
        tensors, self.tensors = self.tensors, None
        return tensors


def require_room(name: str, size: int, free: int, why_whole: str | None) -> None:
    """Check that a model that cannot be read block by block fits into the memory.

    Raises:
        CheckpointError: if it does not.
    """
    if why_whole is not None and size > free:
        raise CheckpointError(
            f"{name} takes {human_size(size)}, {human_size(free)} are free, and it cannot be read block by block: "
            f"{why_whole}"
        )


@dataclass(frozen=True)
class ReadFiles(Files):
    """The files of a checkpoint whose tensors are read once.

    Attributes:
        content: the tensors, and the config that a trainer's file carries; None of another architecture than GPT-2.
    """

    content: Any = None

    @classmethod
    def of(cls, files: Files) -> "ReadFiles":
        """Return files with a GPT-2's tensors."""
        content = files.tensors() if files.architecture is None else None
        return cls(files.place, files.folder, files.config, content)

    def tensors(self) -> Any:
        """Return the tensors by their names in the files, and a trainer's config, as ``Files.tensors`` does."""
        tensors, fields = self.content
        return dict(tensors), fields


def norm_in_ours(norm: str) -> str | None:
    """Return the norm that minigpt needs to compute what transformers computes with a norm: "fused" for a LayerNorm.

    It is None for another: the checkpoint then has its own.
    """
    if is_exact(norm):
        return "fused"
    return None


def architecture_of(place: Path) -> str | None:
    """Return the ``model_type`` of an architecture other than GPT-2, else None."""
    return Files.at(place).architecture


def open_source(place: Path, dtype: str | torch.dtype | None = None) -> Source:
    """Return what the checkpoint at a place holds.

    Raises:
        CheckpointError: if it cannot be read, or has weights of several dtypes and none is asked for.
    """
    state = files_state(place)
    with torch.inference_mode(False):  # the caller may be in that mode, and gradients may be computed later
        files = read_stable(place, ReadFiles.of)
    if files.architecture is not None:
        return other_source(place, state, resolve_dtype(dtype))
    checkpoint = read_checkpoint(files)
    weights = 0
    for tensor in checkpoint.tensors.values():
        weights += tensor.numel()
    return Source(
        place=place,
        state=state,
        is_gpt2=True,
        shape=Shape.of(checkpoint.config),
        sites=site_names(checkpoint.config.n_layer),
        dtype=resolve_dtype(dtype) or only_dtype(checkpoint.tensors, place),
        weights=weights,
        norm=PLAIN_NORM if checkpoint.norms == PLAIN_FORM else "fused",
        tensors=files.tensors()[0],
        why_whole=why_whole(files),
    )


def other_source(place: Path, state: State, dtype: torch.dtype | None) -> Source:
    """Return what the checkpoint of another architecture holds, without reading its weights."""
    model: Any = load_with_transformers(place, dtype=dtype, is_empty=True)
    weights = 0
    for parameter in model.parameters():
        weights += parameter.numel()
    shape, sites = Shape.of(model.config), host_of(model).sites
    return Source(place, state, False, shape, sites, model.dtype, weights, OWN_NORM)
