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
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
    from onnxruntime.quantization.onnx_model import ONNXModel

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
    for how, level in {"MatMulNBits in int4": 0, "MatMulNBits in int4, accuracy_level 4": 4}.items():
        graph = ONNXModel(onnx.load(file))
        graph.replace_gemm_with_matmul()
        quantizer = MatMulNBitsQuantizer(graph.model, block_size=32, is_symmetric=True, bits=4, accuracy_level=level)
        quantizer.process()
        target = folder / f"nbits-{level}.onnx"
        quantizer.model.save_model_to_file(str(target))
        cause = (
            "weights in int4; inputs of products rounded to eight bits, by groups of 32" if level else "weights in int4"
        )
        yield Row("onnxruntime", how, partial(engines.onnx, target), "onnxruntime", cause)


def fuse(file: Path, target: Path) -> bool:
    """Write the file with onnxruntime's fusions of transformers; return whether one was made."""
    from onnxruntime.transformers.optimizer import optimize_model

    model = optimize_model(str(file), model_type="gpt2", num_heads=4, hidden_size=128, use_gpu=False)
    model.save_model_to_file(str(target))
    return any(model.get_fused_operator_statistics().values())
