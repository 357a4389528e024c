"""GGUF files whose metadata contradict their tensors, in which llama.cpp would end the process."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_files import finish

from minigpt.engines.gguf_file import Metadata

SIZES = {"embedding_length": 32, "block_count": 2, "context_length": 64}


def written(
    file: Path,
    *,
    tokens: int = 96,
    heads: int = 4,
    heads_kv: int | None = None,
    eps: dict[str, float] | None = None,
    **sizes: int,
) -> Path:
    """A file with a GPT-2's names and sizes."""
    writer: Any = gguf.GGUFWriter(file, "gpt2")
    for name, size in (SIZES | sizes).items():
        writer.add_uint32(f"gpt2.{name}", size)
    writer.add_head_count(heads)
    for name, value in (eps or {}).items():
        writer.add_float32(f"gpt2.attention.{name}", value)
    if heads_kv is not None:
        writer.add_head_count_kv(heads_kv)
    writer.add_token_list([str(token) for token in range(tokens)])
    for name, shape in {"token_embd": (96, 32), "position_embd": (64, 32), "output_norm": (32,)}.items():
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    for block in range(2):
        writer.add_tensor(f"blk.{block}.attn_qkv.weight", np.ones((96, 32), np.float32))
    finish(writer)
    return file


def test_a_file_that_agrees_is_taken(tmp_path: Path) -> None:
    Metadata(written(tmp_path / "file.gguf"))
    Metadata(written(tmp_path / "grouped.gguf", heads=4, heads_kv=2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({name: size + 1}, f"its {name} is {size + 1}, and its tensors have {size}") for name, size in SIZES.items()),
        ({"tokens": 95}, "it names 95 tokens, and its embedding has 96"),
        ({"heads": 5}, "its head_count is 5, which does not divide 32"),
        ({"heads": 0}, "its head_count is 0, which does not divide 32"),
        ({"heads_kv": 3}, "its head_count_kv is 3, which does not divide 4"),
    ],
)
def test_a_size_that_contradicts_a_tensor(change: dict[str, int], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        Metadata(written(tmp_path / "file.gguf", **change))


def test_a_length_beyond_the_end_of_the_file_takes_no_memory(tmp_path: Path) -> None:
    key = b"general.alignments"
    array_of_bytes = struct.pack("<IIQ", 9, 0, 2**60)
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key + array_of_bytes
    (tmp_path / "file.gguf").write_bytes(header + b"\0" * 100)
    with pytest.raises(ValueError, match="it ends before its metadata or tensors do"):
        Metadata(tmp_path / "file.gguf")


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    whole = written(tmp_path / "file.gguf").read_bytes()
    for size in range(4, len(whole), 199):  # the package names a file without its first four bytes
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(ValueError, match="it ends before its metadata or tensors do"):
            Metadata(tmp_path / "cut.gguf")


@pytest.mark.parametrize("eps", [-1e-5, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["layer_norm_epsilon", "layer_norm_rms_epsilon"])
def test_an_eps_in_which_llama_cpp_would_end_the_process(name: str, eps: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"its {name} must be a float, 0 or more, got"):
        Metadata(written(tmp_path / "file.gguf", eps={name: eps}))
