#!/usr/bin/env bash
# transformers 5.24.0 with accelerate 1.15.0: a model whose weights stay on disk is opened without reading them, if the dtype is that
# of the safetensors file. At another dtype `from_pretrained` reads and casts every weight, throws the result away, and casts
# each weight again when the model is called. The file is mapped meanwhile, so the process grows by the whole file.
#
# `device_map` places embedding, blocks and head on "disk". The file has 427 MB in float32. Each opening is a process of its own.
#
# Seen: opening grows the process by 14 MB at float32, and by 447 MB at bfloat16.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0
cd "$place"

cat > write.py <<'PY'
"""Write a Llama with random weights in float32."""

import torch
import transformers

config = transformers.LlamaConfig(
    vocab_size=8192, hidden_size=1024, intermediate_size=2816, num_hidden_layers=7, num_attention_heads=8
)
torch.manual_seed(0)
transformers.AutoModelForCausalLM.from_config(config).save_pretrained("model")
PY
cat > open.py <<'PY'
"""Print by how many bytes the peak of the process grows as a model is opened at a dtype, its weights on disk."""

import resource
import sys

import torch
import transformers


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


PLACES = {"model.embed_tokens": "disk", "model.layers": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
transformers.AutoModelForCausalLM  # imported before the peak is read
transformers.LlamaForCausalLM
before = peak()
model = transformers.AutoModelForCausalLM.from_pretrained(
    "model", dtype=getattr(torch, sys.argv[1]), device_map=PLACES, offload_folder="folder"
)
assert model.lm_head.weight.device.type == "meta"
print(peak() - before)
PY
venv/bin/python write.py
size=$(stat -c %s model/model.safetensors)
same=$(venv/bin/python open.py float32 2>/dev/null)
other=$(venv/bin/python open.py bfloat16 2>/dev/null)
echo "file: $((size / 1000000)) MB; opening grows the process by $((same / 1000000)) MB at float32, $((other / 1000000)) MB at bfloat16"
[ "$same" -lt $((size / 4)) ] && [ "$other" -gt $((size * 9 / 10)) ]
