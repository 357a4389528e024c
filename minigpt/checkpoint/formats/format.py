"""A family of checkpoints as a table: how it names, stores and describes a GPT-2."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minigpt.config import GPT2Config
from minigpt.engine.pages import MappedFiles
from minigpt.errors import CheckpointError, ConfigError

Tensors = dict[str, Tensor]

GPT2_VOCABULARY = 50257
LINEARS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")  # of a block, as we and most others name them
CAUSAL_MASKS = ("h.{i}.attn.bias", "h.{i}.attn.masked_bias")  # saved by early versions of several
OURS = {field.name for field in dataclasses.fields(GPT2Config)}


class Row(NamedTuple):
    """The family's tensors that make up one of our parameters, {i} standing for the layer, and how each is changed."""

    theirs: tuple[str, ...]
    become: Callable[[Tensor], Tensor]


def same(*theirs: str) -> Row:
    """The tensor as it is; several are concatenated along the last dimension."""
    return Row(theirs, lambda tensor: tensor)


def transposed(*theirs: str) -> Row:
    """A linear layer's (out, in) as our (in, out); several are concatenated along the last dimension."""
    return Row(theirs, lambda tensor: tensor.mT.contiguous() if tensor.ndim == 2 else tensor)


def convolved(*theirs: str) -> Row:
    """A 1-wide convolution's (1, in, out) as our (in, out)."""
    return Row(theirs, lambda tensor: tensor.squeeze(0) if tensor.ndim == 3 else tensor)


@dataclasses.dataclass(frozen=True)
class Format:
    """A family of checkpoints.

    Attributes:
        name: what people call it.
        recognises: returns True if the tensors have this family's names and layouts.
        rows: our parameters, each with the tensors that it comes from. A tensor in no row keeps its name.
        buffers: tensors that are not learned, {i} standing for the layer. They are skipped.
        may_lack: matches our biases that the family may leave out, all together. They become zeros.
        fields: the family's config fields, each with ours. None if its config is a Hugging Face one.
        ignored: config fields that the tensors themselves answer.
        fixed: our config fields that are the same in the whole family.
        tied: whether its head is the token embedding. None compares the values.
    """

    name: str
    recognises: Callable[[Tensors], bool]
    rows: Mapping[str, Row] = dataclasses.field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    may_lack: re.Pattern[str] | None = None
    fields: Mapping[str, tuple[str, ...]] | None = None
    ignored: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tied: bool | None = True

    def describes(self, fields: Mapping[str, Any]) -> bool:
        """Return True if a config has fields of the family that are not also ours."""
        return self.fields is not None and bool(fields.keys() & {*self.fields, *self.ignored} - OURS)

    def config(self, fields: Mapping[str, Any], tensors: Tensors) -> GPT2Config:
        """Return our config for the fields of theirs.

        Raises:
            ConfigError: if a field is unknown, or has a value that we cannot honour.
        """
        known = self.fields or {}
        if unknown := sorted(fields.keys() - known.keys() - set(self.ignored)):
            raise ConfigError(f"unknown fields of a {self.name} config: {', '.join(unknown)}")
        ours = {name: value for theirs, value in fields.items() for name in known.get(theirs, ())}
        tied = self._has_tied_head(tensors) if self.tied is None else self.tied
        settings: dict[str, Any] = {**self.fixed, "tie_word_embeddings": tied, **ours, **_vocabulary(ours)}
        return GPT2Config(**settings)

    def ours(self, tensors: Tensors, n_layer: int) -> Tensors:
        """Return the tensors under our names and in our layout.

        Raises:
            CheckpointError: if parts of one parameter do not fit together.
        """
        layers = [str(layer) for layer in range(n_layer)]
        buffers = {name.replace("{i}", layer) for name in self.buffers for layer in layers}
        left = {name: tensor for name, tensor in tensors.items() if name not in buffers}
        ours, files = {}, MappedFiles()
        for template, row in self.rows.items():
            for layer in layers if "{i}" in template else [""]:
                name, theirs = (template.replace("{i}", layer), [name.replace("{i}", layer) for name in row.theirs])
                if all(name in left for name in theirs):
                    originals = [left.pop(name) for name in theirs]
                    ours[name] = _joined(name, [row.become(tensor) for tensor in originals])
                    for tensor in originals:
                        files.give_back(tensor, ours[name])
        return self._with_zero_biases(ours | left)

    def _with_zero_biases(self, tensors: Tensors) -> Tensors:
        if self.may_lack is None or any(self.may_lack.fullmatch(name) for name in tensors):
            return tensors
        weights = {name.removesuffix("weight") + "bias": tensor for name, tensor in tensors.items()}
        lacking = {name: weight for name, weight in weights.items() if self.may_lack.fullmatch(name)}
        return tensors | {name: weight.new_zeros(weight.shape[-1]) for name, weight in lacking.items()}

    def _has_tied_head(self, tensors: Tensors) -> bool:
        head, embedding = (tensors.get(self.rows[name].theirs[0]) for name in ("lm_head.weight", "wte.weight"))
        return head is None or embedding is None or torch.equal(head, embedding)


def _joined(name: str, parts: list[Tensor]) -> Tensor:
    if len({(part.dtype, part.shape[:-1]) for part in parts}) > 1:
        shapes = ", ".join(f"{part.dtype} {tuple(part.shape)}" for part in parts)
        raise CheckpointError(f"the parts of {name} do not fit together: they are {shapes}")
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _vocabulary(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config fields that follow from a vocabulary's size.

    GPT-2's own vocabulary may be padded to 50,304 or so. Of any other, e.g. characters, no end of text is known.
    """
    size = fields.get("vocab_size")
    if not isinstance(size, int) or not GPT2_VOCABULARY <= size < GPT2_VOCABULARY + 256:
        return {"bos_token_id": None, "eos_token_id": None}
    return {} if size == GPT2_VOCABULARY else {"used_vocab_size": GPT2_VOCABULARY}


# Our names, layouts and config fields are taken from transformers.
HUGGING_FACE = Format(name="Hugging Face", recognises=lambda tensors: True, buffers=CAUSAL_MASKS)
