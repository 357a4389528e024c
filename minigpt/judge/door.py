"""The judge's door to GPT-2: what a checkpoint holds, and how prompts become ids.

Beside this file only the candidates and the reader of windows import the network and what reads it.
"""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from minigpt.checkpoint import Files, open_checkpoint
from minigpt.checkpoint.contents import state_of, unchanged
from minigpt.checkpoint.norms import PLAIN_FORM
from minigpt.checkpoint.opened import only_dtype
from minigpt.config import GPT2Config
from minigpt.device import resolve_dtype
from minigpt.generation import prompt_ids
from minigpt.model.inputs import check_inputs
from minigpt.model.masking import left_padded

__all__ = ["Source", "check_prompt", "left_padded", "open_source", "prompt_ids", "raw_source", "state_of", "unchanged"]


class Source(NamedTuple):
    """What a checkpoint holds.

    Attributes:
        config: of the whole vocabulary, padding included.
        dtype: the one that is asked for, else that of its weights.
        weights: how many numbers it has.
        norm: the norm that transformers computes: "frozen" for the plain form of frozen norms, else "fused".
    """

    config: GPT2Config
    dtype: torch.dtype
    weights: int
    norm: str


def open_source(place: Path, dtype: str | torch.dtype | None = None) -> Source:
    """Return what the checkpoint at a place holds.

    Raises:
        CheckpointError: if it cannot be read, or has weights of several dtypes and none is asked for.
    """
    checkpoint = open_checkpoint(place)
    weights = sum(tensor.numel() for tensor in checkpoint.tensors.values())
    config = dataclasses.replace(checkpoint.config, used_vocab_size=None)
    norm = "frozen" if checkpoint.norms == PLAIN_FORM else "fused"
    return Source(config, resolve_dtype(dtype) or only_dtype(checkpoint.tensors, place), weights, norm)


def raw_source(place: Path) -> tuple[Path, dict[str, Tensor]]:
    """Return the config.json of a checkpoint, and its tensors by their names in the files."""
    files = Files.at(place)
    return files.folder / "config.json", files.tensors()[0]


def check_prompt(config: GPT2Config, ids: list[int]) -> None:
    """Check that a prompt is not empty, fits the context and is in the vocabulary.

    Raises:
        GenerationError: if not.
    """
    check_inputs(config, torch.tensor([ids], dtype=torch.long), None, None, None)
