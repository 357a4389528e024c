"""The arithmetic that a program documents, or its source has, for the types of a file's tensors and its settings."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from minigpt.engines.ctranslate2_generator import Ctranslate2Generator
from minigpt.engines.engine import Engine
from minigpt.engines.llama_cpp_model import LlamaCppModel
from minigpt.engines.onnx_session import OnnxSession
from minigpt.engines.openvino_request import GROUP_SIZE, PRECISION, OpenVinoRequest
from minigpt.engines.weights import IN_GROUPS, OF_INTEGERS, ONE_SCALE
from minigpt.judge.mistakes.arithmetic import (
    InputRounding,
    InUint8,
    as_ggml,
    attention_rounded,
    clipped_sums,
    gelu_by_table,
    in_bfloat16,
    in_groups,
    inputs_rounded,
    q8_k,
    rounded_sums,
    sum_in_float16,
    through_uint8,
    turned,
    weigh,
)
from minigpt.judge.mistakes.mistake import Mistake, as_given
from minigpt.judge.mistakes.rounding import Rounds, q4_0, q8_0, to_bfloat16, to_float16
from minigpt.machine import IS_AMD

Q8_0 = InputRounding("8 bits in blocks of 32", q8_0)
Q8_1 = Q8_0._replace(adds=rounded_sums)
Q8_K = InputRounding("8 bits in blocks of 256", q8_k)
GGML_INPUTS = {  # by the type of the weights: ``vec_dot_type`` in ggml-cpu.c of llama-cpp-python 0.3.36; else Q8_K
    "F16": InputRounding("float16", to_float16), "BF16": InputRounding("bfloat16", to_bfloat16),
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "MXFP4"), Q8_0), **dict.fromkeys(("Q4_1", "Q5_1"), Q8_1),
}  # fmt: skip
GGML_CACHES: dict[str, Rounds] = {"F16": to_float16, "BF16": to_bfloat16, "Q8_0": q8_0, "Q4_0": q4_0}
GGML_CACHES |= {kind: partial(as_ggml, kind=kind) for kind in ("Q4_1", "Q5_0", "Q5_1")}
FLASH_TILE = 64  # tokens of a text from which on GGML's flash attention adds in float32, and keeps queries whole
LEAST_TURNED = 64  # numbers that llama.cpp turns together
OPENVINO_INTEGERS = ("i4", "i8", "u4", "u8")
BY_TENSOR = InputRounding("8 bits with a zero point, by tensor", partial(through_uint8, into=InUint8.by_tensor))
ROWS = InputRounding("8 bits by row", partial(through_uint8, into=InUint8.by_row))
HAS_VNNI = torch.cpu._is_vnni_supported()
WITHOUT_VNNI = ("SSE41", "AVX", "AVX2", "AVX512_CORE")  # of oneDNN's ONEDNN_MAX_CPU_ISA


def documented(engine: Engine, types: Mapping[str, str]) -> list[Mistake]:
    """Return the arithmetic that a program documents, for a model of transformers; none if it is not known.

    Args:
        types: of the file's tensors, by their names.
    """
    roundings: dict[str, InputRounding] = {}
    others: list[Mistake] = []
    if isinstance(engine, LlamaCppModel):
        for name, kind in types.items():
            if kind not in ("F32", "F64"):
                roundings[name] = GGML_INPUTS.get(kind, Q8_K)
        others = [*of_llama_cpp(engine)]
    elif isinstance(engine, Ctranslate2Generator) and "int8" in engine.settings["compute_type"]:
        by_mkl = os.environ.get("CT2_USE_MKL", "0" if IS_AMD else "1") != "0"
        level = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
        is_whole = by_mkl or (HAS_VNNI and level not in WITHOUT_VNNI)
        rows = ROWS if is_whole else clipped(ROWS, InUint8.by_row, one_scale=False)
        roundings = {name: rows for name, kind in types.items() if kind.startswith("int8")}
    elif isinstance(engine, OnnxSession):
        for name, kind in types.items():
            if kind.endswith(OF_INTEGERS):
                is_whole = HAS_VNNI or kind.startswith("uint8")
                roundings[name] = BY_TENSOR if is_whole else clipped(BY_TENSOR, InUint8.by_tensor, ONE_SCALE in kind)
            elif IN_GROUPS in kind:
                roundings[name] = of_group_size(int(kind.rpartition(IN_GROUPS)[2]))
    elif isinstance(engine, OpenVinoRequest):
        size = int(engine.settings.get(GROUP_SIZE, 0))
        if size:
            roundings = {name: of_group_size(size) for name, kind in types.items() if kind in OPENVINO_INTEGERS}
        if engine.settings.get(PRECISION) == "bf16":
            if not {*types.values()}.isdisjoint(OPENVINO_INTEGERS):
                return []  # it is not known how they are multiplied in bfloat16
            others = [Mistake("results of operators rounded to bfloat16", in_bfloat16(engine.is_fused))]
    if not roundings:
        return others
    words = " and ".join(sorted({rounding.words for rounding in roundings.values()}))
    is_causal = all(rounding.rounds is not BY_TENSOR.rounds for rounding in roundings.values())
    return [Mistake(f"inputs of products rounded to {words}", inputs_rounded(roundings), is_causal=is_causal), *others]


def of_group_size(size: int) -> InputRounding:
    return InputRounding(f"8 bits in groups of {size}", partial(in_groups, size=size))


def clipped(rounding: InputRounding, into: Callable[[Tensor], InUint8], one_scale: bool) -> InputRounding:
    """Return a rounding of inputs whose products with int8 are added in pairs, in 16 bits."""
    words = f"{rounding.words}, sums of two products clipped to 16 bits"
    return InputRounding(words, rounding.rounds, partial(clipped_sums, into=into, one_scale=one_scale))


def of_llama_cpp(engine: LlamaCppModel) -> Iterator[Mistake]:
    """Yield what llama.cpp rounds whatever a file holds: GELU, and keys and values by the types of its cache.

    Flash attention halves a cache in float32. Values in float16 are added up in float16, but in long texts.
    """
    yield Mistake("GELU by a table in float16", gelu_by_table)
    kinds = [engine.settings[name].upper() for name in ("type_k", "type_v")]
    is_flash = engine.settings["flash_attn"] != "off"
    if is_flash:
        kinds = ["F16" if kind == "F32" else kind for kind in kinds]
    if kinds == ["F32", "F32"]:
        return
    of_keys, of_values = kinds
    turn_keys = turn_wide if "Q" in of_keys else as_given
    turn_values = turn_64 if "Q" in of_values else as_given
    queries, values = GGML_INPUTS.get(of_keys), GGML_CACHES.get(of_values, as_given)
    mix = partial(weigh, weighted=values)
    words = f"keys and values in {' and '.join(dict.fromkeys(kinds)).lower()}"
    if is_flash:
        words, mix, tile = f"{words} by flash attention", weigh, sys.maxsize
        if of_keys == of_values == "F16":
            queries, tile = InputRounding("", short_in_float16), FLASH_TILE
        if of_values == "F16":
            mix = partial(sum_in_float16, tile=tile)
    keys = GGML_CACHES.get(of_keys, as_given)
    yield Mistake(words, attention_rounded(queries, keys, values, mix, turn_keys, turn_values))


def turn_wide(x: Tensor) -> Tensor:
    """Turn queries and keys as llama.cpp does before it quantizes: by the largest power of 2 in a head's width."""
    width = x.shape[-1] & -x.shape[-1]
    return turned(x, width) if width >= LEAST_TURNED else x


def turn_64(x: Tensor) -> Tensor:
    """Turn values as llama.cpp does before it quantizes."""
    return x if x.shape[-1] % LEAST_TURNED else turned(x, LEAST_TURNED)


def short_in_float16(q: Tensor) -> Tensor:
    """Round queries of a text that is shorter than a tile."""
    return q if q.shape[-2] >= FLASH_TILE else to_float16(q)
