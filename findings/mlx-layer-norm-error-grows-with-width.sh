#!/usr/bin/env bash
# MLX 0.32.4 on the CPU: fast.layer_norm adds a row in one order in float32, so that its error grows with the width.
# A row of one value does not come out as the bias: its mean is not exact.
#
# Seen: from width 256 to 16,384 the error of ordinary rows grows several times, and a constant row is off the bias.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet 'mlx[cpu]==0.32.4' numpy==2.4.6
cd "$place"
venv/bin/python - <<'PY'
import importlib.metadata

import mlx.core as mx
import numpy as np


def norm(x):
    """Return MLX and the truth, with weight 1 and bias 0."""
    ones = mx.ones(x.shape[-1])
    y = mx.fast.layer_norm(mx.array(x), ones, ones * 0, 1e-5)
    wide = x.astype(np.float64)
    true = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    return np.array(y, np.float64), true


def error(width):
    x = np.random.default_rng(0).normal(0.5, 1, (16, width)).astype(np.float32)
    y, true = norm(x)
    return float(np.sqrt(np.square(y - true).mean()))


print("mlx", importlib.metadata.version("mlx"))
narrow, broad = error(256), error(16384)
constant = float(np.abs(norm(np.full((1, 4096), 100.3, np.float32))[0]).max())
print(f"RMS error at width 256: {narrow:.2g}, at 16,384: {broad:.2g}; a constant row of 100.3: {constant:.2g}")
assert broad > 4 * narrow, (narrow, broad)
assert constant > 1e-3, constant
PY
