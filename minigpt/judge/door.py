"""The judge's door to GPT-2: what a checkpoint holds, and how prompts become ids.

Beside this file only the candidates and the reader of windows import the network and what reads it.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minigpt.checkpoint import Files, read_checkpoint, read_stable
from minigpt.checkpoint.contents import state_of, unchanged
from minigpt.checkpoint.norms import PLAIN_FORM
from minigpt.checkpoint.read import only_dtype
from minigpt.checkpoint.transformers_model import load_with_transformers, quiet_transformers
from minigpt.config import site_names
from minigpt.generation import prompt_ids
from minigpt.host import Shape, host_of
from minigpt.inputs import check_rows, left_padded
from minigpt.precision import resolve_dtype

__all__ = [
    "Source", "architecture_of", "check_prompt", "left_padded", "load_with_transformers", "open_source", "prompt_ids",
    "quiet_transformers", "raw_source", "state_of", "unchanged",
]  # fmt: skip


def architecture_of(place: Path) -> str | None:
    """Return the ``model_type`` of an architecture other than GPT-2, else None."""
    return Files.at(place).architecture


class Source(NamedTuple):
    """What a checkpoint holds.

    Attributes:
        shape: its sizes, with the whole vocabulary, padding included.
        sites: the paths of its norms.
        dtype: the one that is asked for, else that of its weights.
        weights: how many numbers it has.
        norm: the norm that transformers computes: "frozen" for the plain form of frozen norms, else "fused".
    """

    shape: Shape
    sites: list[str]
    dtype: torch.dtype
    weights: int
    norm: str


def open_source(place: Path, dtype: str | torch.dtype | None = None) -> Source:
    """Return what the checkpoint at a place holds.

    Raises:
        CheckpointError: if it cannot be read, or has weights of several dtypes and none is asked for.
    """
    if architecture_of(place) is not None:
        return _other_source(place, dtype)
    checkpoint = read_stable(place, read_checkpoint)
    weights = sum(tensor.numel() for tensor in checkpoint.tensors.values())
    shape, sites = Shape.of(checkpoint.config), site_names(checkpoint.config.n_layer)
    norm = "frozen" if checkpoint.norms == PLAIN_FORM else "fused"
    return Source(shape, sites, resolve_dtype(dtype) or only_dtype(checkpoint.tensors, place), weights, norm)


def _other_source(place: Path, dtype: str | torch.dtype | None) -> Source:
    """Return what the checkpoint of another architecture holds, without reading its weights."""
    model: Any = load_with_transformers(place, dtype=resolve_dtype(dtype), is_empty=True)
    shape, weights = Shape.of(model.config), sum(parameter.numel() for parameter in model.parameters())
    return Source(shape, host_of(model).sites, model.dtype, weights, "its own")


def raw_source(place: Path) -> tuple[Path, dict[str, Tensor]]:
    """Return the config.json of a checkpoint, and its tensors by their names in the files."""
    files = Files.at(place)
    return files.folder / "config.json", files.tensors()[0]


def check_prompt(shape: Shape, ids: list[int]) -> None:
    """Check that a prompt is not empty, fits the context and is in the vocabulary.

    Raises:
        GenerationError: if not.
    """
    check_rows(torch.tensor([ids], dtype=torch.long), shape.vocab_size, shape.n_positions)
