#!/usr/bin/env bash
# OpenVINO 2026.4.1: save_model halves the weights unless it is told not to. A model that is saved and read again is
# another model: a weight of 0.1 in float32 is 0.0999755859375.
#
# Seen: the saved constant is f16, and its value is that of float16. With compress_to_fp16=False it stays f32.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet openvino==2026.4.1 numpy==2.4.6
cd "$place"
venv/bin/python - <<'PY'
import numpy as np
import openvino
from openvino import opset15 as ops

weight = np.full((64, 64), 0.1, np.float32)
x = ops.parameter([1, 64], np.float32)
model = openvino.Model([ops.matmul(x, ops.constant(weight), False, False)], [x])


def saved(**how):
    """Return the dtype and a value of the weight after it was saved and read again."""
    openvino.save_model(model, "model.xml", **how)
    again = openvino.Core().read_model("model.xml")
    (constant,) = [node for node in again.get_ops() if node.get_type_name() == "Constant"]
    return constant.get_element_type().get_type_name(), float(constant.data.flat[0])


print("openvino", openvino.__version__)
by_default, whole = saved(), saved(compress_to_fp16=False)
print("save_model by default:", *by_default)
print("compress_to_fp16=False:", *whole)
assert by_default == ("f16", float(np.float16(0.1))), by_default
assert whole == ("f32", float(np.float32(0.1))), whole
PY
