#!/usr/bin/env bash
# Flax 0.12.8: LayerNorm computes the variance in one pass, E[x^2] - E[x]^2, unless use_fast_variance=False. In float32, rows
# with a mean of 1,000 and a deviation of 1 are off by up to half a deviation.
#
# Seen: the largest error is 0.53 by default, and 1e-4 with use_fast_variance=False.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet flax==0.12.8 jax==0.10.2 numpy==2.4.6
cd "$place"
venv/bin/python - <<'PY'
import flax
import jax.numpy as jnp
import numpy as np
from flax import linen

x = np.random.default_rng(0).normal(1000, 1, (64, 768)).astype(np.float32)
wide = x.astype(np.float64)
true = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-6)


def error(**how):
    """Return the largest error of a row of deviation 1."""
    y = linen.LayerNorm(use_bias=False, use_scale=False, **how).apply({}, jnp.asarray(x))
    return float(np.abs(np.asarray(y, np.float64) - true).max())


print("flax", flax.__version__)
by_default, two_passes = error(), error(use_fast_variance=False)
print(f"by default: {by_default:.2g}; use_fast_variance=False: {two_passes:.2g}")
assert by_default > 0.01, by_default
assert two_passes < 1e-3, two_passes
PY
