"""Families of checkpoints, each a table: how it names, stores and describes a GPT-2.

To add a family, write its ``Format`` here and put it first in FORMATS. A tensor that is in no row keeps its name, so a
family that names GPT-2's parts as we do needs rows for the others only::

    MINE = Format(
        name="mine",
        recognises=lambda tensors: "embed.weight" in tensors,
        rows={
            "wte.weight": same("embed.weight"),
            **{f"h.{{i}}.{name}.weight": transposed(f"h.{{i}}.{name}.weight") for name in LINEARS},
        },
    )
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minigpt.config import GPT2Config
from minigpt.errors import CheckpointError, ConfigError

CONFIG, SAFETENSORS = "config.json", "model.safetensors"

Tensors = dict[str, Tensor]

GPT2_VOCABULARY = 50257
LINEARS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")  # of a block, as we and most others name them
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
CAUSAL_MASKS = re.compile(r"h\.\d+\.attn\.(masked_)?bias|trf_blocks\.\d+\.att\.mask")  # buffers, which are not learned


class Origin(NamedTuple):
    """The source tensors of one parameter, {i} standing for the layer, and the transform of each."""

    sources: tuple[str, ...]
    transform: Callable[[Tensor], Tensor]


def same(*sources: str) -> Origin:
    """The tensor as it is; several are concatenated along the last dimension."""
    return Origin(sources, lambda tensor: tensor)


def transposed(*sources: str) -> Origin:
    """A linear layer's (out, in) as our (in, out); several are concatenated along the last dimension."""
    return Origin(sources, lambda tensor: tensor.mT.contiguous() if tensor.ndim == 2 else tensor)


@dataclasses.dataclass(frozen=True)
class Format:
    """A family of checkpoints.

    Attributes:
        name: what people call it.
        recognises: returns True if the tensors have this family's names and layouts.
        rows: our parameters, each with the tensors that it comes from. A tensor in no row keeps its name.
        may_lack: matches our biases that the family may leave out, all together. They become zeros.
        fields: the family's config fields, each with ours that it sets; none for what the tensors answer themselves.
            Empty if its config is a Hugging Face one.
        fixed: our config fields that are the same in the whole family.
    """

    name: str
    recognises: Callable[[Tensors], bool]
    rows: Mapping[str, Origin] = dataclasses.field(default_factory=dict)
    may_lack: re.Pattern[str] | None = None
    fields: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def config(self, fields: Mapping[str, Any], tensors: Tensors) -> GPT2Config:
        """Return our config for the fields of a config file, in this family's names or in Hugging Face's.

        Args:
            fields: of the file.
            tensors: under our names.

        Raises:
            ConfigError: if a field is unknown, or has a value that we cannot honour.
        """
        renamed = {name for name, ours in self.fields.items() if ours != (name,)}
        if renamed.isdisjoint(fields):
            return GPT2Config.from_dict(fields)
        unknown = sorted(fields.keys() - self.fields.keys())
        if unknown:
            raise ConfigError(f"unknown fields of a {self.name} config: {', '.join(unknown)}")
        settings: dict[str, Any] = dict(self.fixed)
        settings["tie_word_embeddings"] = _is_tied(tensors)
        for name, value in fields.items():
            for ours in self.fields[name]:
                settings[ours] = value
        return GPT2Config(**settings, **_vocabulary(settings.get("vocab_size")))

    def converted(self, source_tensors: Tensors) -> Tensors:
        """Return the tensors under our names and in our layout, without buffers.

        Raises:
            CheckpointError: if parts of one parameter do not fit together.
        """
        left: Tensors = {}  # what no parameter has taken
        for name, tensor in source_tensors.items():
            if not CAUSAL_MASKS.fullmatch(name):
                left[name] = tensor
        tensors: Tensors = {}
        for template, origin in self.rows.items():
            for layer in itertools.count():  # until there is no such tensor
                sources = [source.format(i=layer) for source in origin.sources]
                if not left.keys() >= set(sources):
                    break
                name = template.format(i=layer)
                parts = [origin.transform(left.pop(source)) for source in sources]
                tensors[name] = _concatenated(name, parts)
        tensors |= left
        if self.may_lack is None or any(map(self.may_lack.fullmatch, tensors)):
            return tensors
        biases: Tensors = {}
        for name, weight in tensors.items():
            bias = name.removesuffix("weight") + "bias"
            if self.may_lack.fullmatch(bias):
                biases[bias] = weight.new_zeros(weight.shape[-1])
        return tensors | biases


def same_values(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors are the same memory, or equal."""
    return one.data_ptr() == other.data_ptr() or torch.equal(one, other)


def _is_tied(tensors: Tensors) -> bool:
    """Return True unless the file has a head of other values than the embedding's."""
    head, embedding = tensors.get("lm_head.weight"), tensors.get("wte.weight")
    if head is None or embedding is None:
        return True
    return same_values(head, embedding)


def _concatenated(name: str, parts: list[Tensor]) -> Tensor:
    kinds = {(part.dtype, part.shape[:-1]) for part in parts}
    if len(kinds) > 1:
        shapes = ", ".join(f"{part.dtype} {tuple(part.shape)}" for part in parts)
        raise CheckpointError(f"the parts of {name} do not fit together: they are {shapes}")
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim=-1)


def _vocabulary(size: Any) -> dict[str, Any]:
    """Return the config fields that follow from a vocabulary's size.

    GPT-2's own vocabulary may be padded to 50,304 or so. Of any other, e.g. characters, no end of text is known.
    """
    if not isinstance(size, int) or not GPT2_VOCABULARY <= size < GPT2_VOCABULARY + 256:
        return {"bos_token_id": None, "eos_token_id": None}
    if size == GPT2_VOCABULARY:
        return {}
    return {"used_vocab_size": GPT2_VOCABULARY}


# The book "Build a Large Language Model (From Scratch)": queries, keys and values are three linear layers, (out, in).
_BLOCK = "trf_blocks.{i}"
_BOOK_NORMS = {"h.{i}.ln_1": f"{_BLOCK}.norm1", "h.{i}.ln_2": f"{_BLOCK}.norm2", "ln_f": "final_norm"}
_BOOK_LINEARS = {"attn.c_proj": "att.out_proj", "mlp.c_fc": "ff.layers.0", "mlp.c_proj": "ff.layers.2"}


def _book_rows() -> dict[str, Origin]:
    rows = {
        "wte.weight": same("tok_emb.weight"),
        "wpe.weight": same("pos_emb.weight"),
        "lm_head.weight": same("out_head.weight"),
    }
    for norm, source in _BOOK_NORMS.items():
        rows[f"{norm}.weight"] = same(f"{source}.scale")
        rows[f"{norm}.bias"] = same(f"{source}.shift")
    qkv = [f"{_BLOCK}.att.W_{part}" for part in ("query", "key", "value")]
    rows["h.{i}.attn.c_attn.weight"] = transposed(*(f"{linear}.weight" for linear in qkv))
    rows["h.{i}.attn.c_attn.bias"] = same(*(f"{linear}.bias" for linear in qkv))
    for name, source in _BOOK_LINEARS.items():
        rows[f"h.{{i}}.{name}.weight"] = transposed(f"{_BLOCK}.{source}.weight")
        rows[f"h.{{i}}.{name}.bias"] = same(f"{_BLOCK}.{source}.bias")
    return rows


BOOK = Format(
    name="book (trf_blocks)",
    recognises=lambda tensors: "tok_emb.weight" in tensors or "trf_blocks.0.norm1.scale" in tensors,
    rows=_book_rows(),
    may_lack=re.compile(r"h\.\d+\.attn\.c_attn\.bias"),
    fields={
        "vocab_size": ("vocab_size",),
        "context_length": ("n_positions",),
        "emb_dim": ("n_embd",),
        "n_heads": ("n_head",),
        "n_layers": ("n_layer",),
        "drop_rate": DROPOUTS,
        "qkv_bias": (),
    },
)


def _stores_out_in(tensors: Tensors) -> bool:
    """Return True if c_attn is stored (out, in). Its shape tells, since it is never square."""
    first = tensors.get("h.0.attn.c_attn.weight")
    return first is not None and first.ndim == 2 and first.shape[0] == 3 * first.shape[1]


# nanoGPT and minGPT: Hugging Face's names, but linear layers are stored (out, in), and biases may be missing. nanoGPT
# uses the exact GELU. A model trained before June 2023, or by minGPT, needs a config.json in its folder.
NANOGPT = Format(
    name="nanoGPT",
    recognises=_stores_out_in,
    rows={f"h.{{i}}.{linear}.weight": transposed(f"h.{{i}}.{linear}.weight") for linear in LINEARS},
    may_lack=re.compile(r"(.*\.)?(c_attn|c_proj|c_fc|ln_1|ln_2|ln_f)\.bias"),
    fields={
        "vocab_size": ("vocab_size",),
        "n_layer": ("n_layer",),
        "n_head": ("n_head",),
        "n_embd": ("n_embd",),
        "block_size": ("n_positions",),
        "dropout": DROPOUTS,
        "bias": (),
    },
    fixed={"activation_function": "gelu"},
)


# Our names, layouts and config fields are taken from transformers.
HUGGING_FACE = Format(name="Hugging Face", recognises=lambda tensors: True)

FORMATS = [BOOK, NANOGPT, HUGGING_FACE]  # the first that recognises the tensors
