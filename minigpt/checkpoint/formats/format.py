"""A family of checkpoints as a table: how it names, stores and describes a GPT-2."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minigpt.config import GPT2Config
from minigpt.errors import CheckpointError, ConfigError

Tensors = dict[str, Tensor]

GPT2_VOCABULARY = 50257
LINEARS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")  # of a block, as we and most others name them
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
CAUSAL_MASKS = re.compile(r"h\.\d+\.attn\.(masked_)?bias")  # saved by early versions of several
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
        buffers: matches the tensors that are not learned. They are skipped.
        may_lack: matches our biases that the family may leave out, all together. They become zeros.
        fields: our config fields, each with the family's. None if its config is a Hugging Face one.
        ignored: config fields that the tensors themselves answer.
        fixed: our config fields that are the same in the whole family.
    """

    name: str
    recognises: Callable[[Tensors], bool]
    rows: Mapping[str, Row] = dataclasses.field(default_factory=dict)
    buffers: re.Pattern[str] | None = None
    may_lack: re.Pattern[str] | None = None
    fields: Mapping[str, str] | None = None
    ignored: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def config(self, fields: Mapping[str, Any], tensors: Tensors) -> GPT2Config:
        """Return our config for the fields of a config file, theirs or a Hugging Face one.

        Args:
            fields: of the file.
            tensors: under our names.

        Raises:
            ConfigError: if a field is unknown, or has a value that we cannot honour.
        """
        theirs = {*(self.fields or {}).values(), *self.ignored}
        if self.fields is None or not fields.keys() & theirs - OURS:
            return GPT2Config.from_dict(fields)
        if unknown := sorted(fields.keys() - theirs):
            raise ConfigError(f"unknown fields of a {self.name} config: {', '.join(unknown)}")
        head, embedding = tensors.get("lm_head.weight"), tensors.get("wte.weight")
        tied = head is None or embedding is None or same_values(head, embedding)
        ours = {name: fields[their] for name, their in self.fields.items() if their in fields}
        settings: dict[str, Any] = {**self.fixed, "tie_word_embeddings": tied, **ours}
        return GPT2Config(**settings, **_vocabulary(ours.get("vocab_size")))

    def ours(self, tensors: Tensors) -> Tensors:
        """Return the tensors under our names and in our layout.

        Raises:
            CheckpointError: if parts of one parameter do not fit together.
        """
        left = {name: own for name, own in tensors.items() if not (self.buffers and self.buffers.fullmatch(name))}
        ours: Tensors = {}
        for template, row in self.rows.items():
            for layer in itertools.count():  # until there is no such tensor
                name, theirs = template.format(i=layer), [part.format(i=layer) for part in row.theirs]
                if not all(part in left for part in theirs):
                    break
                ours[name] = _joined(name, [row.become(left.pop(part)) for part in theirs])
        return self._with_zero_biases(ours | left)

    def _with_zero_biases(self, tensors: Tensors) -> Tensors:
        if self.may_lack is None or any(self.may_lack.fullmatch(name) for name in tensors):
            return tensors
        weights = {name.removesuffix("weight") + "bias": tensor for name, tensor in tensors.items()}
        lacking = {name: weight for name, weight in weights.items() if self.may_lack.fullmatch(name)}
        return tensors | {name: weight.new_zeros(weight.shape[-1]) for name, weight in lacking.items()}


def same_values(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors are the same memory, or equal."""
    return one.data_ptr() == other.data_ptr() or torch.equal(one, other)


def _joined(name: str, parts: list[Tensor]) -> Tensor:
    if len({(part.dtype, part.shape[:-1]) for part in parts}) > 1:
        shapes = ", ".join(f"{part.dtype} {tuple(part.shape)}" for part in parts)
        raise CheckpointError(f"the parts of {name} do not fit together: they are {shapes}")
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _vocabulary(size: Any) -> dict[str, Any]:
    """Return the config fields that follow from a vocabulary's size.

    GPT-2's own vocabulary may be padded to 50,304 or so. Of any other, e.g. characters, no end of text is known.
    """
    if not isinstance(size, int) or not GPT2_VOCABULARY <= size < GPT2_VOCABULARY + 256:
        return {"bos_token_id": None, "eos_token_id": None}
    return {} if size == GPT2_VOCABULARY else {"used_vocab_size": GPT2_VOCABULARY}


# Our names, layouts and config fields are taken from transformers.
HUGGING_FACE = Format(name="Hugging Face", recognises=lambda tensors: True, buffers=CAUSAL_MASKS)
