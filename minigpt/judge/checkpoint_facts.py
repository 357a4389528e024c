"""A checkpoint before anything is read with it: its sizes, the sites of its norms, its dtype."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minigpt.checkpoint import Files
from minigpt.checkpoint.contents import CONFIG, State, files_state, read_stable
from minigpt.checkpoint.formats import HUGGING_FACE
from minigpt.checkpoint.norms import PLAIN_FORM, PLAIN_NORM
from minigpt.checkpoint.offloading import why_whole
from minigpt.checkpoint.read import Checkpoint, only_dtype, read_checkpoint
from minigpt.checkpoint.transformers_model import load_with_transformers
from minigpt.choices import human_size
from minigpt.config import site_names
from minigpt.errors import CheckpointError
from minigpt.host import Shape, host_of
from minigpt.precision import resolve_dtype
from minigpt.recipe import Recipe
from minigpt.report.fields import OWN_NORM

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class CheckpointFacts:
    """A checkpoint, and how it is read.

    Attributes:
        place: its folder or file.
        state: of its files, before they were read; None of one that is read from a record.
        is_gpt2: whether it is a GPT-2; transformers opens any other architecture.
        shape: its sizes, with the whole vocabulary, padding included.
        weights: how many numbers it has.
        dtype: the one that is asked for, else that of its weights.
        norm: the norm that transformers computes: "frozen" for the plain form of frozen norms, else "fused".
        sites: the paths of its norms; once it has been read, in the order of the data.
        source: what the user calls it.
        attention, device: with which it is read.
        offload: whether its weights stay in their files, since it is larger than the memory that it may take.
        unread: why transformers cannot read it, in words; empty if it can.
        notes: what a reader should know of how it is read.
        places, blocks: the paths of its norms and blocks, and of its blocks, in the order of the data.
        embedding: the path of its token embedding.
        layer_types: the type of each block's attention, as transformers calls it; empty if all are alike.
        kept: the dtypes, by name, of Parameters and buffers that transformers keeps in another dtype than ``dtype``.
        versions: of what has read it.
    """

    place: Path
    state: State | None
    is_gpt2: bool
    shape: Shape
    weights: int
    dtype: torch.dtype
    norm: str
    sites: list[str]
    source: str = ""
    attention: str = "sdpa"
    device: torch.device = CPU
    offload: bool = False
    unread: str = ""
    notes: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)
    embedding: str = ""
    layer_types: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)

    def in_our_arithmetic(self, attention: str) -> Any:
        """Return a GPT-2 of minigpt in reference arithmetic, with the norms that transformers computes."""
        recipe = Recipe(
            self.place,
            norm=None if self.norm == PLAIN_NORM else "fused",  # that one is the checkpoint's own
            attention=attention,
            arithmetic="reference",
            device=self.device,
            dtype=self.dtype,
        )
        return recipe.load().model


def read_facts(place: Path, dtype: str | torch.dtype | None = None) -> tuple[CheckpointFacts, dict[str, Tensor]]:
    """Return the facts of a checkpoint, and a GPT-2's tensors by their names in the files.

    The weights of another architecture are not read.

    Raises:
        CheckpointError: if it cannot be read, or has weights of several dtypes and none is asked for.
    """
    state = files_state(place)
    asked = resolve_dtype(dtype)
    with torch.inference_mode(False):  # the caller may be in that mode, and gradients may be computed later
        checkpoint, tensors = read_stable(place, _read_gpt2)
    if checkpoint is None:
        model: Any = load_with_transformers(place, dtype=asked, is_empty=True)
        weights = sum(parameter.numel() for parameter in model.parameters())
        sites = host_of(model).sites
        facts = CheckpointFacts(place, state, False, Shape.of(model.config), weights, model.dtype, OWN_NORM, sites)
        return facts, tensors
    unread = ""
    if checkpoint.form is not HUGGING_FACE:
        unread = f"is of the family {checkpoint.form.name}"
    elif Files.at(place).config is None:
        unread = f"has no {CONFIG}"
    facts = CheckpointFacts(
        place=place,
        state=state,
        is_gpt2=True,
        shape=Shape.of(checkpoint.config),
        weights=sum(tensor.numel() for tensor in checkpoint.tensors.values()),
        dtype=asked or only_dtype(checkpoint.tensors, place),
        norm=PLAIN_NORM if checkpoint.norms == PLAIN_FORM else "fused",
        sites=site_names(checkpoint.config.n_layer),
        unread=unread,
    )
    return facts, tensors


def _read_gpt2(files: Files) -> tuple[Checkpoint | None, dict[str, Tensor]]:
    """Return a GPT-2, and its tensors by their names in the files; None and none of another architecture."""
    if files.architecture is not None:
        return None, {}
    content = files.tensors()
    return read_checkpoint(files, content=content), content[0]


def within_memory(facts: CheckpointFacts, memory: int, free: int, most: int) -> CheckpointFacts:
    """Return the facts of a checkpoint whose weights stay in their files, if they are too large and can stay there.

    Args:
        memory: the bytes that a model may take in float64.
        free: the bytes that are free.
        most: new tokens that are compared after a prompt where the weights stay in their files.

    Raises:
        CheckpointError: if it takes more than is free, and its weights cannot stay in their files.
    """
    size = facts.weights * torch.float64.itemsize
    if size <= memory:
        return facts
    note = f"The model takes {human_size(size)} in float64, and may take {human_size(memory)} here."
    why = why_whole(Files.at(facts.place)) if facts.is_gpt2 else None
    if why is not None:
        require_room(str(facts.place), size, free, why)
        return dataclasses.replace(facts, notes=[f"{note} It is in memory all the same, since {why}."])
    note += f" So its weights are read block by block, and at most {most} new tokens are compared after each prompt."
    return dataclasses.replace(facts, offload=True, notes=[note])


def require_room(name: str, size: int, free: int, why_whole: str) -> None:
    """Check that a model that cannot be read block by block fits into the memory.

    Raises:
        CheckpointError: if it does not.
    """
    if size > free:
        raise CheckpointError(
            f"{name} takes {human_size(size)}, {human_size(free)} are free, and it cannot be read block by block: "
            f"{why_whole}"
        )
