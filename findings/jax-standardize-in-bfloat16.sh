#!/usr/bin/env bash
# JAX 0.10.2: jax.nn.standardize computes a one-pass variance, by default in the dtype of its input. In bfloat16 rows with a
# mean of 100 and a deviation of 1 come out hundreds of times too large, and finite.
#
# Seen: the result's RMS, which is 1 in exact arithmetic, is above 100.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet jax==0.10.2 numpy==2.4.6
cd "$place"
venv/bin/python - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np

x = jnp.asarray(np.random.default_rng(0).normal(100, 1, (64, 768)), jnp.bfloat16)
wide = np.asarray(x, np.float64)
true = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
y = np.asarray(jax.nn.standardize(x), np.float64)
sizes = [float(np.sqrt(np.square(rows).mean())) for rows in (true, y)]
print("jax", jax.__version__)
print(f"RMS of the truth {sizes[0]:.3g}, of jax.nn.standardize {sizes[1]:.3g}")
assert 0.9 < sizes[0] < 1.1, sizes
assert np.isfinite(y).all()
assert sizes[1] > 100, sizes
PY
