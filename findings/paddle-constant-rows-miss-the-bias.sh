#!/usr/bin/env bash
# Paddle 3.3.1 on the CPU: layer_norm of a row of one value is not the bias. Its mean is not exact, and what is left is
# divided by sqrt(eps).
#
# Seen: a row of 768 times 100.3 comes out as 0.029, where the right answer is 0.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet paddlepaddle==3.3.1 numpy==2.4.6
cd "$place"
venv/bin/python - <<'PY'
import warnings

warnings.simplefilter("ignore")
import numpy as np
import paddle

errors = []
for value in (0.1, 1.0, -2.5, 10.0, 100.3):
    x = paddle.full([1, 768], value, dtype="float32")
    y = paddle.nn.functional.layer_norm(x, [768], epsilon=1e-5).numpy()
    errors.append(float(np.abs(y).max()))
print("paddlepaddle", paddle.__version__)
print("off the bias, by value:", *(f"{error:.2g}" for error in errors))
assert errors[1] == 0, errors  # 768 times 1 is exact
assert max(errors) > 0.01, errors
PY
