#!/usr/bin/env bash
# Keras 3.15.1, Flax 0.12.8 and Haiku 0.0.17 have three default epsilons of a LayerNorm: 1e-3, 1e-6 and 1e-5. So one
# model that is written in two of them by its defaults is two models where deviations are small.
#
# Seen: 0.001 1e-06 1e-05.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet keras==3.15.1 flax==0.12.8 dm-haiku==0.0.17 jax==0.10.2
cd "$place"
venv/bin/python - <<'PY'
import inspect
import os

os.environ["KERAS_BACKEND"] = "jax"
import haiku
import keras
from flax import linen


def default(make, name):
    return inspect.signature(make.__init__).parameters[name].default


found = (
    default(keras.layers.LayerNormalization, "epsilon"),
    linen.LayerNorm.epsilon,
    default(haiku.LayerNorm, "eps"),
)
print("keras", keras.__version__, "flax, dm-haiku:", *found)
assert found == (1e-3, 1e-6, 1e-5), found
PY
