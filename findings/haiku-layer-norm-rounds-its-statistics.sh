#!/usr/bin/env bash
# Haiku 0.0.17: LayerNorm rounds mean and variance to the dtype of its input. In bfloat16 rows with a mean of 100 are
# off by tenths of a deviation, where a result that is rounded once is off by hundredths at most.
#
# Seen: many times the error of the exact result after one rounding to bfloat16.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet dm-haiku==0.0.17 jax==0.10.2 numpy==2.4.6
cd "$place"
venv/bin/python - <<'PY'
import haiku
import jax.numpy as jnp
import numpy as np

x = jnp.asarray(np.random.default_rng(0).normal(100, 10, (64, 768)), jnp.bfloat16)
wide = np.asarray(x, np.float64)
true = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
norm = haiku.without_apply_rng(haiku.transform(lambda x: haiku.LayerNorm(-1, False, False)(x)))
y = np.asarray(norm.apply({}, x), np.float64)
once = np.asarray(jnp.asarray(true, jnp.bfloat16), np.float64)
errors = [float(np.sqrt(np.square(rows - true).mean())) for rows in (once, y)]
print("dm-haiku", haiku.__version__)
print(f"RMS error of one rounding {errors[0]:.2g}, of haiku.LayerNorm {errors[1]:.2g}")
assert errors[0] < 2.5e-3, errors
assert errors[1] > 5 * errors[0], errors
PY
