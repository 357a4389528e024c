#!/usr/bin/env bash
# transformers 5.12.1: a language model whose head is tied to its embedding, as most small ones are, cannot read a text when
# device_map puts both on "disk". from_pretrained lists the weights in safetensors files for accelerate, and leaves out the
# second name of a tied one; accelerate 1.15.0 looks it up by that name. With a head of its own the same model reads.
#
# Seen: KeyError 'lm_head.weight' in the first call of the tied model, and logits of the other one. 5.13.0 lists both names.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.12.1 accelerate==1.15.0
cd "$place"

cat > read.py <<'PY'
"""Save a small Llama, tied or not, open it with all matrices on "disk", and let it read three tokens."""

import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

SIZES = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
config = LlamaConfig(**SIZES, tie_word_embeddings=sys.argv[1] == "tied")
AutoModelForCausalLM.from_config(config).save_pretrained(sys.argv[1])
places = {"model.norm": "cpu", "model.rotary_emb": "cpu", "model.embed_tokens": "disk", "model.layers": "disk", "lm_head": "disk"}
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], device_map=places, offload_folder=f"{sys.argv[1]}/offload")
try:
    with torch.no_grad():
        result = f"logits of shape {tuple(model(torch.tensor([[1, 2, 3]])).logits.shape)}"
except KeyError as error:
    result = f"KeyError {error}"
print(result)
assert result == {"own": "logits of shape (1, 3, 96)", "tied": "KeyError 'lm_head.weight'"}[sys.argv[1]]
PY
echo "transformers 5.12.1, accelerate 1.15.0"
own=$(venv/bin/python read.py own 2>/dev/null)
tied=$(venv/bin/python read.py tied 2>/dev/null)
echo "a head of its own: $own"
echo "a tied head: $tied"
