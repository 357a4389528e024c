"""llama.cpp: types of weights, types of the cache, flash attention."""

import ctypes
import importlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bench.others import write_gguf
from elsewhere.gpt2 import Row

from minigpt import engines

PACKAGES = ["llama-cpp-python==0.3.36", "gguf==0.19.0"]
WHOLE = {"type_k": "f32", "type_v": "f32"}
GELU = "GELU by a table in half precision"
KEYS = "keys and values in float16"
FILE_TYPES = {  # ``llama_ftype``
    "F16": 1, "BF16": 32, "Q8_0": 7, "Q6_K": 18, "Q5_1": 9, "Q5_K_M": 17, "Q4_K_M": 15, "Q4_1": 3, "Q4_0": 2,
    "IQ4_NL": 25,
}  # fmt: skip


def quantized(file: Path, kind: str) -> Path:
    """Write a file in float32 with another type of weights, by llama.cpp; return the path."""
    lib: Any = importlib.import_module("llama_cpp")
    how, target = lib.llama_model_quantize_default_params(), file.with_name(f"{kind}.gguf")
    how.ftype = FILE_TYPES[kind]
    if lib.llama_model_quantize(str(file).encode(), str(target).encode(), ctypes.byref(how)):
        raise RuntimeError(f"llama.cpp cannot write {target}")
    return target


def rows(folder: Path) -> Iterator[Row]:
    files = {kind: write_gguf(folder / "demo", kind) for kind in ("f32", "f16", "bf16", "q8_0")}

    def row(how: str, kind: str, cause: str, **options: Any) -> Row:
        return Row("llama.cpp", how, partial(engines.gguf, files[kind], **options), "llama-cpp-python", cause)

    yield row("F32 file", "f32", f"{KEYS}; {GELU}")
    yield row("F32 file, cache in f32", "f32", GELU, **WHOLE)
    yield row("F32 file, flash attention", "f32", f"{KEYS} inside the kernel; {GELU}", flash_attn=True)
    same = f"{KEYS} inside the kernel all the same; {GELU}"
    yield row("F32 file, flash attention, cache in f32", "f32", same, flash_attn=True, **WHOLE)
    yield row("F16 file", "f16", "weights and inputs of products rounded to float16")
    yield row("BF16 file", "bf16", "weights and inputs of products rounded to bfloat16")
    yield row("Q8_0 file", "q8_0", "weights and inputs of products rounded to eight bits, by blocks of 32")
    for kind in ("bf16", "q8_0", "q5_1", "q4_0"):
        cause = f"keys and values in {kind}; {GELU}"
        yield row(
            f"F32 file, flash attention, cache in {kind}", "f32", cause, flash_attn=True, type_k=kind, type_v=kind
        )
    for kind in FILE_TYPES:
        candidate = partial(engines.gguf, quantized(files["f32"], kind), **WHOLE)
        rounded = f"weights in {kind}, and inputs of products rounded by their types; {GELU}"
        yield Row("llama.cpp", f"{kind} file by llama.cpp, cache in f32", candidate, "llama-cpp-python", rounded)
