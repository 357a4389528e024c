#!/usr/bin/env bash
# llama.cpp (llama-cpp-python 0.3.36) on the CPU: GELU comes from a table in float16, also where the file and the cache are in
# float32. So a GPT-2 in float32 is not computed in float32.
#
# llama-cpp-python has no wheel on PyPI, so this compiles it: minutes.
#
# Seen, as RMS error of the logits of one block by their RMS, with a cache in float32: 3e-4 from float64, and 8e-6 from
# float64 with the input and the output of GELU rounded to float16.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet llama-cpp-python==0.3.36 gguf==0.19.0 numpy==2.4.6
cd "$place"

cat > gpt2.py <<'PY'
"""Write a GPT-2 of one block with random weights in float32 as GGUF."""

import gguf
import numpy as np

HEADS, WIDTH, WORDS, PLACES = 4, 128, 64, 256


def write(path):
    """Write the file; return its tensors by name."""
    random, tensors, file = np.random.default_rng(0), {}, gguf.GGUFWriter(path, "gpt2")

    def add(name, *shape, mean=0.0, std=0.3):
        tensors[name] = (mean + std * random.standard_normal(shape)).astype(np.float32)
        file.add_tensor(name, tensors[name])

    file.add_context_length(PLACES)
    file.add_embedding_length(WIDTH)
    file.add_feed_forward_length(4 * WIDTH)
    file.add_block_count(1)
    file.add_head_count(HEADS)
    file.add_layer_norm_eps(1e-5)
    file.add_vocab_size(WORDS)
    file.add_tokenizer_model("no_vocab")
    add("token_embd.weight", WORDS, WIDTH)
    add("position_embd.weight", PLACES, WIDTH)
    add("output.weight", WORDS, WIDTH)
    for norm in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        add(f"{norm}.weight", WIDTH, mean=1.0)
        add(f"{norm}.bias", WIDTH)
    for name, rows, columns in (("attn_qkv", 3, 1), ("attn_output", 1, 1), ("ffn_up", 4, 1), ("ffn_down", 1, 4)):
        add(f"blk.0.{name}.weight", rows * WIDTH, columns * WIDTH, std=0.1)
        add(f"blk.0.{name}.bias", rows * WIDTH)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return tensors
PY
venv/bin/python - <<'PY'
import llama_cpp
import numpy as np
from gpt2 import HEADS, PLACES, WIDTH, write


def logits(ids, **how):
    """Return llama.cpp's logits (T, V)."""
    model = llama_cpp.Llama("gpt2.gguf", n_ctx=PLACES, logits_all=True, verbose=False, n_threads=1, **how)
    model.eval(ids)
    return model.scores[: len(ids)].copy()


def truth(ids, w, gelu):
    """Return the logits in float64."""

    def norm(x, name):
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def affine(x, name):
        return x @ w[f"blk.0.{name}.weight"].T + w[f"blk.0.{name}.bias"]

    x = w["token_embd.weight"][ids] + w["position_embd.weight"][: len(ids)]
    qkv = affine(norm(x, "blk.0.attn_norm"), "attn_qkv").reshape(len(ids), 3, HEADS, -1)
    q, k, v = qkv.transpose(1, 2, 0, 3)  # each (heads, T, size)
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(WIDTH // HEADS)
    weights = np.exp(np.where(np.tri(len(ids), dtype=bool), scores, -np.inf))
    y = weights / weights.sum(-1, keepdims=True) @ v
    x = x + affine(y.transpose(1, 0, 2).reshape(len(ids), WIDTH), "attn_output")
    x = x + affine(gelu(affine(norm(x, "blk.0.ffn_norm"), "ffn_up")), "ffn_down")
    return norm(x, "output_norm") @ w["output.weight"].T


def tanh_gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def halved_gelu(x):
    """GELU whose input and output are rounded to float16."""
    return tanh_gelu(x.astype(np.float16).astype(np.float64)).astype(np.float16).astype(np.float64)


def error(y, expected):
    return float(np.sqrt(((y - expected) ** 2).mean() / (expected**2).mean()))


w = {name: x.astype(np.float64) for name, x in write("gpt2.gguf").items()}
ids = list(range(3, 43))
y = logits(ids, type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32)
whole, halved = error(y, truth(ids, w, tanh_gelu)), error(y, truth(ids, w, halved_gelu))
print("llama-cpp-python", llama_cpp.__version__)
print(f"error against float64: {whole:.2g}; with GELU's input and output rounded to float16: {halved:.2g}")
assert whole > 2e-5
assert halved < whole / 3
PY
