"""onnxruntime: the export as it is, with its fusions of transformers, and with weights of eight bits."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from elsewhere.gpt2 import Row
from elsewhere.programs.exported import PACKAGES as PACKAGES
from elsewhere.programs.exported import export

from minigpt import engines

ROUNDED = "weights and inputs of products rounded to eight bits"


def rows(folder: Path) -> Iterator[Row]:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    file = export(folder)
    yield Row("onnxruntime", "export of transformers' GPT-2", partial(engines.onnx, file), "onnxruntime")
    plain = partial(engines.onnx, file, graph_optimization_level="ORT_DISABLE_ALL")
    yield Row("onnxruntime", "the same, no optimisation", plain, "onnxruntime")
    fused = folder / "fused.onnx"
    if fuse(file, fused):
        yield Row("onnxruntime", "with its fusions of GPT-2", partial(engines.onnx, fused), "onnxruntime")
    for how, options in {
        "int8 by tensor": {"weight_type": QuantType.QInt8},
        "int8 by channel": {"weight_type": QuantType.QInt8, "per_channel": True},
        "uint8 by channel": {"weight_type": QuantType.QUInt8, "per_channel": True},
    }.items():
        target = folder / f"{how.replace(' ', '-')}.onnx"
        quantize_dynamic(file, target, **options)
        yield Row("onnxruntime", how, partial(engines.onnx, target), "onnxruntime", ROUNDED)


def fuse(file: Path, target: Path) -> bool:
    """Write the file with onnxruntime's fusions of transformers; return whether one was made."""
    from onnxruntime.transformers.optimizer import optimize_model

    model = optimize_model(str(file), model_type="gpt2", num_heads=4, hidden_size=128, use_gpu=False)
    model.save_model_to_file(str(target))
    return any(model.get_fused_operator_statistics().values())
