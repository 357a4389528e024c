"""The metadata of a GGUF file against its tensors: llama.cpp ends the process where they contradict each other."""

import re
from pathlib import Path
from typing import Any

from minigpt.engines.engine import load_package


def check_metadata(file: Path) -> None:
    """Check the sizes in a GGUF file.

    Raises:
        ConfigError: if the package gguf is not installed.
        Exception: of any kind, if the file is damaged, or a size contradicts a tensor; the message says which.
    """
    gguf = load_package("gguf", "gguf")

    class Reader(gguf.GGUFReader):
        def _get(self, offset: int, *how: Any, **more: Any) -> Any:
            if offset >= len(self.data):  # else it counts on to what a length says
                raise ValueError("it ends before its metadata do")
            return super()._get(offset, *how, **more)

    reader = Reader(file)
    if (_metadata(reader, "split.count") or 1) > 1:  # other files have the other tensors
        return
    shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}  # the length of a row first
    if "token_embd.weight" not in shapes:
        raise ValueError("it has no token_embd.weight")
    width, vocabulary = shapes["token_embd.weight"]
    sizes = {"embedding_length": width}
    if "position_embd.weight" in shapes:
        sizes["context_length"] = shapes["position_embd.weight"][1]
    blocks = [int(number) for name in shapes for number in re.findall(r"^blk\.(\d+)\.", name)]
    if blocks:
        sizes["block_count"] = max(blocks) + 1
    architecture = _metadata(reader, "general.architecture")
    for name, size in sizes.items():
        stated = _metadata(reader, f"{architecture}.{name}")
        if stated != size:
            raise ValueError(f"its {name} is {stated}, and its tensors have {size}")
    tokens = reader.get_field("tokenizer.ggml.tokens")
    if tokens is not None and len(tokens.data) != vocabulary:
        raise ValueError(f"it names {len(tokens.data)} tokens, and its embedding has {vocabulary}")
    if not any(re.match(r"blk\.\d+\.attn_(q|qkv)\.", name) for name in shapes):
        return
    heads = _metadata(reader, f"{architecture}.attention.head_count")
    groups = _metadata(reader, f"{architecture}.attention.head_count_kv")
    if reader.get_field(f"{architecture}.attention.key_length") is not None and heads:
        width = heads  # a head's width is its own
    for name, whole, part in (("head_count", width, heads), ("head_count_kv", heads, groups)):
        if isinstance(part, int) and (part < 1 or whole % part != 0):
            raise ValueError(f"its {name} is {part}, which does not divide {whole}")


def _metadata(reader: Any, key: str) -> Any:
    """Return a value of the metadata; None without it."""
    field = reader.get_field(key)
    return None if field is None else field.contents()
