"""The arithmetic that a program documents, or its source has, for the types of a file's tensors and its settings."""

from collections.abc import Iterator, Mapping
from functools import partial

from minigpt.engines.ctranslate2_generator import Ctranslate2Generator
from minigpt.engines.engine import Engine
from minigpt.engines.llama_cpp_model import LlamaCppModel
from minigpt.engines.onnx_session import OnnxSession
from minigpt.engines.openvino_request import GROUP_SIZE, OpenVinoRequest
from minigpt.engines.weights import OF_INTEGERS
from minigpt.judge.mistakes.arithmetic import (
    InputRounding,
    attention_rounded,
    by_row,
    gelu_by_table,
    in_groups,
    inputs_rounded,
    q8_k,
    rounded_sums,
    unsigned,
)
from minigpt.judge.mistakes.mistake import Mistake, as_given
from minigpt.judge.mistakes.rounding import Rounds, q8_0, to_bfloat16, to_float16

Q8_0 = InputRounding("8 bits in blocks of 32", q8_0)
Q8_1 = Q8_0._replace(adds=rounded_sums)
Q8_K = InputRounding("8 bits in blocks of 256", q8_k)
GGML_INPUTS = {  # by the type of the weights: ``vec_dot_type`` in ggml-cpu.c of llama-cpp-python 0.3.36; else Q8_K
    "F16": InputRounding("float16", to_float16), "BF16": InputRounding("bfloat16", to_bfloat16),
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "MXFP4"), Q8_0), **dict.fromkeys(("Q4_1", "Q5_1"), Q8_1),
}  # fmt: skip
GGML_CACHES: dict[str, Rounds] = {"f16": to_float16, "bf16": to_bfloat16, "q8_0": q8_0}
OPENVINO_INTEGERS = ("i4", "i8", "u4", "u8")
BY_TENSOR = InputRounding("8 bits with a zero point, by tensor", unsigned)
ROWS = InputRounding("8 bits by row", by_row)


def documented(engine: Engine, types: Mapping[str, str]) -> list[Mistake]:
    """Return the arithmetic that a program documents, for a model of transformers; none if it is not known.

    Args:
        types: of the file's tensors, by their names.
    """
    roundings: dict[str, InputRounding] = {}
    others: list[Mistake] = []
    if isinstance(engine, LlamaCppModel):
        if engine.settings["flash_attn"] != "off":  # its sums in float16 are not modelled
            return []
        for name, kind in types.items():
            if kind not in ("F32", "F64"):
                roundings[name] = GGML_INPUTS.get(kind, Q8_K)
        others = [*of_llama_cpp(engine)]
    elif isinstance(engine, Ctranslate2Generator) and "int8" in engine.settings["compute_type"]:
        roundings = {name: ROWS for name, kind in types.items() if kind.startswith("int8")}
    elif isinstance(engine, OnnxSession):
        roundings = {name: BY_TENSOR for name, kind in types.items() if kind.endswith(OF_INTEGERS)}
    elif isinstance(engine, OpenVinoRequest) and (size := int(engine.settings.get(GROUP_SIZE, 0))):
        groups = InputRounding(f"8 bits in groups of {size}", partial(in_groups, size=size))
        roundings = {name: groups for name, kind in types.items() if kind in OPENVINO_INTEGERS}
    if not roundings:
        return others
    words = " and ".join(sorted({rounding.words for rounding in roundings.values()}))
    is_causal = BY_TENSOR not in roundings.values()  # whose scale is that of all tokens
    return [Mistake(f"inputs of products rounded to {words}", inputs_rounded(roundings), is_causal=is_causal), *others]


def of_llama_cpp(engine: LlamaCppModel) -> Iterator[Mistake]:
    """Yield what llama.cpp rounds whatever a file holds: GELU, and keys and values by the types of its cache."""
    yield Mistake("GELU by a table in float16", gelu_by_table)
    kinds = (engine.settings["type_k"], engine.settings["type_v"])
    if kinds != ("f32", "f32"):
        keys, values = (GGML_CACHES.get(kind, as_given) for kind in kinds)
        words = " and ".join(dict.fromkeys(kinds))
        yield Mistake(f"keys and values in {words}", attention_rounded(keys, values, values))
