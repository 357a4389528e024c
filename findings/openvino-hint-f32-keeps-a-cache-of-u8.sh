#!/usr/bin/env bash
# OpenVINO 2026.4.1 on the CPU: INFERENCE_PRECISION_HINT f32 leaves the keys and values of earlier tokens in eight bits, where
# a model keeps them as states beside scaled dot product attention. So a model that asks for float32 decodes with a cache
# of u8. KV_CACHE_PRECISION f32 keeps float32, and so does EXECUTION_MODE_HINT ACCURACY.
#
# Seen, as RMS error of attention over 8 tokens that come one by one, by its own RMS:
# f32 hint: cache u8, 5e-3. With KV_CACHE_PRECISION f32, or ACCURACY: cache f32, 1e-7.
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
from openvino.op import util

HEADS, SIZE = 4, 32
SHAPE = openvino.PartialShape([-1, HEADS, -1, SIZE])


def model():
    """Attention of queries to the keys and values so far, which are states."""
    q, k, v = (ops.parameter(SHAPE, np.float32, name=name) for name in "qkv")
    row = ops.parameter([-1], np.int32, name="beam_idx")
    zero, sinks, grown = ops.constant(0), [], []
    for name, new in (("keys", k), ("values", v)):
        info = util.VariableInfo()
        info.data_shape, info.data_type, info.variable_id = SHAPE, openvino.Type.f32, name
        variable = util.Variable(info)
        batch = ops.gather(ops.shape_of(new), ops.constant(np.array([0])), zero)
        empty = ops.concat([batch, ops.constant(np.array([HEADS, 0, SIZE]))], 0)
        start = ops.broadcast(ops.constant(np.float32(0)), empty)
        before = ops.gather(ops.read_value(start, variable), row, zero)
        both = ops.concat([before, new], 2)
        sinks.append(ops.assign(both, variable))
        grown.append(both)
    y = ops.scaled_dot_product_attention(q, *grown)
    return openvino.Model([ops.result(y)], sinks, [q, k, v, row])


def exact(seen):
    """Attention of the last token to all of them, in float64."""
    k, v = (np.concatenate([token[part] for token in seen], 2).astype(np.float64) for part in (1, 2))
    scores = seen[-1][0] @ k.transpose(0, 1, 3, 2) / SIZE**0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def decoded(tokens, **how):
    """Return the precision of the cache, and the error over tokens that come one by one."""
    compiled = openvino.Core().compile_model(model(), "CPU", how)
    request = compiled.create_infer_request()
    request.reset_state()
    error = size = 0.0
    for n, token in enumerate(tokens):
        y, truth = request.infer([*token, np.array([0], np.int32)])[0], exact(tokens[: n + 1])
        error, size = error + ((y - truth) ** 2).sum(), size + (truth**2).sum()
    error = float((error / size) ** 0.5)
    precision = compiled.get_property("KV_CACHE_PRECISION").get_type_name()
    print(f"{how}: cache {precision}, error {error:.2g}")
    return precision, error


print("openvino", openvino.__version__)
random = np.random.default_rng(0)
tokens = [[random.standard_normal((1, HEADS, 1, SIZE)).astype(np.float32) for _ in range(3)] for _ in range(8)]
precision, error = decoded(tokens, INFERENCE_PRECISION_HINT="f32")
assert precision == "u8" and 1e-3 < error < 1e-1
for how in ({"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}, {"EXECUTION_MODE_HINT": "ACCURACY"}):
    precision, error = decoded(tokens, **how)
    assert precision == "f32" and error < 1e-6
PY
