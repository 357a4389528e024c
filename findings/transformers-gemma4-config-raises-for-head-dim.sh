#!/usr/bin/env bash
# transformers 5.24.0: the layers of Gemma 4 have heads of two widths, and its text config raises where it is asked for
# `head_dim`. The error is a RuntimeError, not an AttributeError. So `hasattr(config, "head_dim")` raises, and so does
# `getattr(config, "head_dim", None)`, which gives the width or None for configs of other architectures. The width stands
# in `vars(config)`, in config.json and in `config.per_layer_config`.
#
# Seen: Llama without a head_dim: 128; Gemma 4: AmbiguousGlobalPerLayerAttributeError twice; by layer 256 and 512.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet transformers==5.24.0
cat > "$place/ask.py" <<'PY'
"""Ask configs for the width of a head, as a program for any architecture does."""

import transformers


def asked(ask):
    try:
        return ask()
    except RuntimeError as error:
        return type(error).__name__


llama = transformers.LlamaConfig()
assert getattr(llama, "head_dim", None) == 128
assert getattr(transformers.GPT2Config(), "head_dim", None) is None
config = transformers.Gemma4TextConfig()
answers = [asked(lambda: hasattr(config, "head_dim")), asked(lambda: getattr(config, "head_dim", None))]
widths = sorted({layer.head_dim for layer in config.per_layer_config})
print("Llama:", llama.head_dim, "Gemma 4:", *answers, "by layer:", *widths, "in vars:", vars(config)["head_dim"])
assert answers == ["AmbiguousGlobalPerLayerAttributeError"] * 2
assert widths == [256, 512]
PY
"$place/venv/bin/python" "$place/ask.py" 2>/dev/null
