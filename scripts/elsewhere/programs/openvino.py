"""OpenVINO: by hints of precision, after save_model, and with the states that it keeps between tokens."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from elsewhere.gpt2 import Row
from elsewhere.programs.exported import PACKAGES as ONNX
from elsewhere.programs.exported import export

from minigpt import engines

PACKAGES = [*ONNX, "openvino==2026.4.1", "nncf==3.4.0"]
HINT = "INFERENCE_PRECISION_HINT"
BFLOAT16 = "products in bfloat16, this processor's default; where it has none the default is float32"


def rows(folder: Path) -> Iterator[Row]:
    import nncf
    import openvino

    model = openvino.convert_model(export(folder))
    whole, halved = folder / "whole.xml", folder / "halved.xml"
    openvino.save_model(model, whole, compress_to_fp16=False)
    openvino.save_model(model, halved)

    def row(how: str, file: Path, cause: str = "", **options: Any) -> Row:
        return Row("OpenVINO", how, partial(engines.openvino, file, **options), "openvino", cause)

    yield row("by default", whole, BFLOAT16)
    yield row("hint f32", whole, **{HINT: "f32"})
    yield row("hint f16", whole, "the same bits as hint bf16", **{HINT: "f16"})
    yield row("hint bf16", whole, "products in bfloat16", **{HINT: "bf16"})
    yield row("EXECUTION_MODE_HINT ACCURACY", whole, EXECUTION_MODE_HINT="ACCURACY")
    yield row("save_model by default, hint f32", halved, "weights halved to float16 in the file", **{HINT: "f32"})
    modes = nncf.CompressWeightsMode
    kinds = {
        "int8": {},
        "int4": {"mode": modes.INT4_SYM, "group_size": 32},
        "nf4": {"mode": modes.NF4, "group_size": 32},
    }
    for how, options in kinds.items():
        compressed = folder / f"{how}.xml"
        model = nncf.compress_weights(openvino.convert_model(export(folder)), **options)
        openvino.save_model(model, compressed, compress_to_fp16=False)
        rounded = "inputs of products rounded to eight bits, by groups of 32"
        if how == "nf4":
            rounded = f"of the head alone {rounded}"
        yield row(f"{how} by nncf, hint f32", compressed, f"weights in {how}; {rounded}", **{HINT: "f32"})
        yield row(f"{how} by nncf, by default", compressed, f"weights in {how}; {BFLOAT16}")
        whole_inputs = {HINT: "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
        yield row(f"{how} by nncf, hint f32, no dynamic quantization", compressed, f"weights in {how}", **whole_inputs)
