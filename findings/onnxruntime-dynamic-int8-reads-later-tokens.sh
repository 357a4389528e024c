#!/usr/bin/env bash
# onnxruntime 1.32.0: a model that quantize_dynamic has quantized rounds the inputs of a product with one scale and one zero
# point for all of its rows, as DynamicQuantizeLinear is defined. The rows are the tokens of a text, so the logits of a token
# depend on the tokens after it, and on the texts beside it in a batch: a causal model is causal no more.
#
# Seen: the product of a row moves by 2 % of its size beside a row that is twice as large, and by 36 % where that is 50 times
# as large.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
cd "$place"

venv/bin/python - <<'PY'
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import QuantType, quantize_dynamic

random = np.random.default_rng(0)
weight = random.standard_normal((64, 16)).astype(np.float32)
graph = helper.make_graph(
    [helper.make_node("MatMul", ["x", "w"], ["y"])],
    "product",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 64])],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 16])],
    [numpy_helper.from_array(weight, "w")],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
model.ir_version = 8
onnx.save(model, "float.onnx")
quantize_dynamic("float.onnx", "int8.onnx", weight_type=QuantType.QInt8)
session = onnxruntime.InferenceSession("int8.onnx")


def first(*rows):
    """Return the product of the first of some rows."""
    return session.run(None, {"x": np.stack(rows)})[0][0]


print("onnxruntime", onnxruntime.__version__)
row, other = random.standard_normal((2, 64)).astype(np.float32)
alone = first(row)
moves = {}
for name, later in {"twice as large": 2 * other, "50 times as large": 50 * other}.items():
    moves[name] = float(np.linalg.norm(first(row, later) - alone) / np.linalg.norm(alone))
    print(f"beside a row that is {name}: {moves[name]:.2g} of its size")
assert 0 < moves["twice as large"] < 0.05
assert moves["50 times as large"] > 0.1
PY
