#!/usr/bin/env bash
# litgpt 0.5.13: RMSNorm with add_unit_offset, as Gemma's norms have it, adds 1 to its weight in the weight's own dtype, before it
# widens to float32. In bfloat16 the sum is rounded, so the norm rounds twice. transformers 5.24.0 widens first. Without
# the offset litgpt's norm rounds once.
#
# Seen, RMS error by the result's, in bfloat16: one rounding 1.7e-3, transformers 1.7e-3, litgpt 2.4e-3; without the offset 1.7e-3.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 numpy==2.4.6
# litgpt's own pins ask for another torch
"$place/venv/bin/pip" install --quiet --no-deps --target="$place/litgpt" litgpt==0.5.13
cd "$place"
venv/bin/python - <<'PY'
import ast
from pathlib import Path

import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

code = ast.parse(Path("litgpt/litgpt/model.py").read_text())  # the class alone: the package imports lightning
(cls,) = [node for node in code.body if isinstance(node, ast.ClassDef) and node.name == "RMSNorm"]
exec(compile(ast.Module([cls], []), "model.py", "exec"))

torch.manual_seed(0)
x, weight = torch.randn(64, 768).bfloat16(), (0.5 * torch.randn(768)).bfloat16()
row = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def errors(norm, scale):
    """Return the errors of one rounding and of a norm in bfloat16."""
    norm = norm.bfloat16()
    norm.weight.data.copy_(weight)
    true = row * scale
    return [float((y.double() - true).norm() / true.norm()) for y in (true.bfloat16(), norm(x).detach())]


seen = {
    "litgpt, 1 + weight": errors(RMSNorm(768, add_unit_offset=True), 1 + weight.double()),
    "transformers, 1 + weight": errors(GemmaRMSNorm(768), 1 + weight.double()),
    "litgpt, weight": errors(RMSNorm(768), weight.double()),
}
for name, (once, found) in seen.items():
    print(f"{name}: one rounding {once:.2g}, found {found:.2g}")
ratios = [found / once for once, found in seen.values()]
assert ratios[0] > 1.3 and max(ratios[1:]) < 1.05, ratios
PY
