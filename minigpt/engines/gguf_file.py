"""GGUF files: metadata that are held against the tensors, and the tensors dequantized."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minigpt.choices import AMOUNT
from minigpt.engines.engine import load_package

NORM_EPS = ("layer_norm_epsilon", "layer_norm_rms_epsilon", "group_norm_epsilon")


class Metadata:
    """The metadata of a GGUF file, by their keys there: None for a key that the file lacks.

    llama.cpp ends the process where sizes contradict the tensors, or an eps is negative, so they are checked first.

    Raises:
        ConfigError: if the package gguf is not installed.
        Exception: of any kind, if the file is damaged, a size contradicts a tensor, or an eps is negative or not
            finite; the message says which.
    """

    def __init__(self, file: Path) -> None:
        gguf = load_package("gguf", "gguf")

        class Reader(gguf.GGUFReader):
            def _get(self, offset: int, dtype: Any, count: int = 1, **order: Any) -> Any:
                values: Any = ()
                with contextlib.suppress(ValueError):  # a part of a number is left
                    values = super()._get(offset, dtype, count, **order)
                if len(values) < count:  # else it counts on to what a length says
                    raise ValueError("it ends before its metadata or tensors do")
                return values

        self.reader = Reader(file)
        if (self["split.count"] or 1) == 1:  # other files have the other tensors
            self._check()

    def __getitem__(self, key: str) -> Any:
        field = self.reader.get_field(key)
        if field is None:
            return None
        value = field.contents()
        is_float32 = field.types[0] is load_package("gguf", "gguf").GGUFValueType.FLOAT32
        if is_float32:
            return float(str(np.float32(value)))  # 1e-05, and not 9.99999974738e-06
        return value

    def names(self) -> Any:
        """Return gguf's map from transformers' names of modules to those of this architecture's tensors."""
        gguf = load_package("gguf", "gguf")
        named = {name: architecture for architecture, name in gguf.MODEL_ARCH_NAMES.items()}
        name = self["general.architecture"]
        return gguf.get_tensor_name_map(named[name], self[f"{name}.block_count"])

    @property
    def value_count(self) -> int:
        """The number of values in all tensors."""
        return sum(int(tensor.n_elements) for tensor in self.reader.tensors)

    def types(self) -> dict[str, str]:
        """Return the names of the tensors' types, as "Q4_K"."""
        return {tensor.name: tensor.tensor_type.name for tensor in self.reader.tensors}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors by their names in the file, in float32.

        Raises:
            ValueError: if a type is not known, or a tensor is named twice.
        """
        quants = load_package("gguf.quants", "gguf")
        for tensor in self.reader.tensors:
            try:
                values = quants.dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError as error:
                raise ValueError(f"{tensor.name} is of the type {tensor.tensor_type.name}: {error}") from error
            yield tensor.name, torch.from_numpy(np.array(values, np.float32))

    def _check(self) -> None:
        shapes = {tensor.name: tensor.shape.tolist() for tensor in self.reader.tensors}  # the length of a row first
        if "token_embd.weight" not in shapes:
            raise ValueError("it has no token_embd.weight")
        width, vocabulary = shapes["token_embd.weight"]
        sizes = {"embedding_length": width}
        if "position_embd.weight" in shapes:
            sizes["context_length"] = shapes["position_embd.weight"][1]
        blocks = [int(number) for name in shapes for number in re.findall(r"^blk\.(\d+)\.", name)]
        if blocks:
            sizes["block_count"] = max(blocks) + 1
        architecture = self["general.architecture"]
        for name, size in sizes.items():
            stated = self[f"{architecture}.{name}"]
            if stated != size:
                raise ValueError(f"its {name} is {stated}, and its tensors have {size}")
        for name in NORM_EPS:
            eps = self[f"{architecture}.attention.{name}"]
            if eps is not None and not AMOUNT.accepts(eps):
                raise ValueError(f"its {name} must {AMOUNT.requirement}, got {eps}")
        tokens = self.reader.get_field("tokenizer.ggml.tokens")
        if tokens is not None and len(tokens.data) != vocabulary:
            raise ValueError(f"it names {len(tokens.data)} tokens, and its embedding has {vocabulary}")
        if not any(re.match(r"blk\.\d+\.attn_(q|qkv)\.", name) for name in shapes):
            return
        heads = self[f"{architecture}.attention.head_count"]
        groups = self[f"{architecture}.attention.head_count_kv"]
        if self.reader.get_field(f"{architecture}.attention.key_length") is not None and heads:
            width = heads  # a head's width is its own
        for name, whole, part in (("head_count", width, heads), ("head_count_kv", heads, groups)):
            if isinstance(part, int) and (part < 1 or whole % part != 0):
                raise ValueError(f"its {name} is {part}, which does not divide {whole}")
