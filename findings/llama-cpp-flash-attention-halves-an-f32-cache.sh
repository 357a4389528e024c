#!/usr/bin/env bash
# llama.cpp (llama-cpp-python 0.3.36) on the CPU: with flash attention a cache in float32 gives the bits of a cache in float16.
# So type_k and type_v F32 take twice the memory and change nothing.
#
# llama-cpp-python has no wheel on PyPI, so this compiles it: minutes.
#
# Seen: the same bits, and a distance of 7e-4 of the logits' RMS from the same cache without flash attention.
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
from gpt2 import PLACES, write


def logits(ids, **how):
    """Return llama.cpp's logits (T, V)."""
    model = llama_cpp.Llama("gpt2.gguf", n_ctx=PLACES, logits_all=True, verbose=False, n_threads=1, **how)
    model.eval(ids)
    return model.scores[: len(ids)].copy()


F32 = llama_cpp.GGML_TYPE_F32
write("gpt2.gguf")
ids = list(range(3, 43))
plain = logits(ids, type_k=F32, type_v=F32)
flash = logits(ids, type_k=F32, type_v=F32, flash_attn=True)
halved = logits(ids, flash_attn=True)
size = float(np.sqrt((plain.astype(np.float64) ** 2).mean()))
apart = float(np.sqrt(((flash.astype(np.float64) - plain) ** 2).mean())) / size
print("llama-cpp-python", llama_cpp.__version__)
print(f"flash attention with a cache in float32 is {apart:.1g} of the logits' RMS from no flash attention")
print("flash attention, cache in float32 and in float16, the same bits:", np.array_equal(flash, halved))
assert np.array_equal(flash, halved)
assert 1e-4 < apart < 1e-2
PY
