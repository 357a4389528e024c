"""A family of checkpoints as one table: how it names, lays out and describes a GPT-2."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from minigpt.config import GPT2Config
from minigpt.engine.pages import MappedFiles
from minigpt.errors import CheckpointError, ConfigError

Tensors = dict[str, Tensor]

GPT2_VOCABULARY = 50257
LINEARS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")  # of a block, as we and most others name them
CAUSAL_MASKS = ("h.{i}.attn.bias", "h.{i}.attn.masked_bias")  # saved by early versions of several


@dataclasses.dataclass(frozen=True)
class Row:
    """Where one of our parameters comes from: their tensors, {i} standing for the layer, and how they become it."""

    theirs: tuple[str, ...]
    become: Callable[[Tensor], Tensor]


def same(*theirs: str) -> Row:
    """The tensor as it is; of several, one behind the other along the last dimension."""
    return Row(theirs, lambda tensor: tensor)


def transposed(*theirs: str) -> Row:
    """A linear layer's (out, in) as our (in, out); of several, side by side."""
    return Row(theirs, lambda tensor: tensor.mT.contiguous() if tensor.ndim == 2 else tensor)


def convolved(*theirs: str) -> Row:
    """A 1-wide convolution's (1, in, out) as our (in, out)."""
    return Row(theirs, lambda tensor: tensor.squeeze(0) if tensor.ndim == 3 else tensor)


@dataclasses.dataclass(frozen=True)
class Format:
    """A family of checkpoints.

    Attributes:
        name: what people call it.
        recognises: whether these tensors are named, and laid out, as this family's are.
        rows: our parameter -> where it comes from; a tensor that no row speaks of keeps its name.
        buffers: tensors that hold nothing learned, {i} standing for the layer.
        may_lack: matches those of our biases that the family may leave out, all together; they are zeros then.
        bias_field: the field of its config that says whether it has left them out.
        fields: its config's field -> ours; None where the config is a Hugging Face one.
        fixed: fields of ours that are the same throughout the family.
        tied: whether its head is the embedding; None where the values decide.
    """

    name: str
    recognises: Callable[[Tensors], bool]
    rows: Mapping[str, Row] = dataclasses.field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    may_lack: re.Pattern[str] | None = None
    bias_field: str | None = None
    fields: Mapping[str, tuple[str, ...]] | None = None
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tied: bool | None = True

    def config(self, fields: Mapping[str, Any], tensors: Tensors) -> GPT2Config:
        """Our config from the fields of theirs.

        Raises:
            ConfigError: a field is unknown, or has a value that we cannot honour.
        """
        known = self.fields or {}
        if unknown := sorted(str(name) for name in fields if name not in known and name != self.bias_field):
            raise ConfigError(f"unknown fields of a {self.name} config: {', '.join(unknown)}")
        ours = {name: value for theirs, value in fields.items() for name in known.get(theirs, ())}
        tied = self._has_tied_head(tensors) if self.tied is None else self.tied
        settings: dict[str, Any] = {**self.fixed, "tie_word_embeddings": tied, **ours, **_vocabulary(ours)}
        return GPT2Config(**settings)

    def ours(self, tensors: Tensors, n_layer: int, *, has_biases: bool | None = None) -> Tensors:
        """The tensors under our names and in our layout; what no row speaks of under its own.

        Biases that are all absent become zeros, unless the config says, by ``has_biases``, that there are some.

        Raises:
            CheckpointError: two tensors would get one name, or parts of one parameter do not fit together.
        """
        left = dict(tensors)
        for layer, name in itertools.product(range(n_layer), self.buffers):
            left.pop(name.replace("{i}", str(layer)), None)
        ours: Tensors = {}
        files = MappedFiles()
        for ours_name, theirs, become in self._rows(n_layer):
            if all(name in left for name in theirs):
                originals = [left.pop(name) for name in theirs]
                ours[ours_name] = _joined(ours_name, [become(tensor) for tensor in originals])
                for tensor in originals:
                    files.give_back(tensor, ours[ours_name])
        if twice := ours.keys() & left.keys():
            raise CheckpointError(f"{min(twice)} is in the file twice, under two names")
        return ours | left if has_biases is True else self._with_zero_biases(ours | left, may_have=has_biases is None)

    def _rows(self, n_layer: int) -> list[tuple[str, list[str], Callable[[Tensor], Tensor]]]:
        return [
            (ours.replace("{i}", layer), [name.replace("{i}", layer) for name in row.theirs], row.become)
            for ours, row in self.rows.items()
            for layer in (map(str, range(n_layer)) if "{i}" in ours else ("",))
        ]

    def _with_zero_biases(self, tensors: Tensors, may_have: bool) -> Tensors:
        if self.may_lack is None:
            return tensors
        if has := [name for name in tensors if self.may_lack.fullmatch(name)]:
            if may_have:
                return tensors
            raise CheckpointError(f"{min(has)} is in the file, and its config says that there are none of these")
        weights = {name.removesuffix("weight") + "bias": tensor for name, tensor in tensors.items() if tensor.ndim}
        zeros = {
            name: weight.new_zeros(weight.shape[-1])
            for name, weight in weights.items()
            if self.may_lack.fullmatch(name)
        }
        return tensors | zeros

    def _has_tied_head(self, tensors: Tensors) -> bool:
        head, embedding = (tensors.get(self.rows[name].theirs[0]) for name in ("lm_head.weight", "wte.weight"))
        return head is None or embedding is None or torch.equal(head, embedding)


def _joined(name: str, parts: list[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    if len({(part.dtype, part.shape[:-1]) for part in parts}) > 1 or not parts[0].ndim:
        shapes = ", ".join(f"{part.dtype} {tuple(part.shape)}" for part in parts)
        raise CheckpointError(f"the parts of {name} do not fit together: they are {shapes}")
    return torch.cat(parts, dim=-1)


def _vocabulary(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What a config without ids implies: GPT-2's own vocabulary, filled up to 50,304 or so, or one of which we know
    nothing, such as characters."""
    size = fields.get("vocab_size")
    if not isinstance(size, int) or not GPT2_VOCABULARY <= size < GPT2_VOCABULARY + 256:
        return {"bos_token_id": None, "eos_token_id": None}
    return {} if size == GPT2_VOCABULARY else {"used_vocab_size": GPT2_VOCABULARY}
