#!/usr/bin/env bash
# OpenVINO 2026.4.1 on a CPU with AVX-512 BF16 and without FP16: INFERENCE_PRECISION_HINT f16 is accepted and computes in
# bfloat16, which has 8 bits where float16 has 11. The results are those of hint bf16, bit for bit. On another CPU the script
# says so and checks nothing.
#
# Seen, as RMS error of a product of 256 terms by its own RMS: hint f32 1e-7, hints f16 and bf16 both 2e-3.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet openvino==2026.4.1 numpy==2.4.6
cd "$place"

venv/bin/python - <<'PY'
import pathlib
import sys

import numpy as np
import openvino
from openvino import opset15 as ops

flags = pathlib.Path("/proc/cpuinfo").read_text().split()
if "avx512_bf16" not in flags or "avx512_fp16" in flags or "amx_fp16" in flags:
    sys.exit(print("this CPU has no AVX-512 BF16, or has FP16 too: nothing is checked"))
random = np.random.default_rng(0)
weight, rows = (random.standard_normal(size).astype(np.float32) for size in ((256, 256), (64, 256)))
x = ops.parameter([64, 256], np.float32)
model = openvino.Model([ops.matmul(x, ops.constant(weight), False, False)], [x])
truth = rows.astype(np.float64) @ weight


def product(hint):
    """Return the product at a hint, its error, and what the property says."""
    compiled = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": hint})
    y = compiled([rows])[0].copy()
    error = float(np.sqrt(((y - truth) ** 2).mean() / (truth**2).mean()))
    said = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    print(f"hint {hint}: the property says {said}, error {error:.2g}")
    return y, error, said


print("openvino", openvino.__version__)
(_, whole, _), (half, error, said), (brain, _, _) = (product(hint) for hint in ("f32", "f16", "bf16"))
assert whole < 1e-6
assert 1e-3 < error < 1e-2
assert np.array_equal(half, brain)
assert said == "bf16", said
PY
