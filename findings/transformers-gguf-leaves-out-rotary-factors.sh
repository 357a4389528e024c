#!/usr/bin/env bash
# transformers 5.24.0: from_pretrained(gguf_file=) of a Llama leaves out rope_freqs.weight, the table by which llama.cpp divides
# rotary frequencies. Converters write it for Llama 3.1 and later. Nothing is said, and the model is another one. So is a
# file's llama.rope.scaling.type left out, as of YaRN.
#
# Seen, as RMS difference of the logits by their RMS: 1.0 of a model whose frequencies are scaled, and 0 of one without.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 gguf==0.19.0 numpy==2.4.6
cd "$place"

cat > read.py <<'PY'
"""Write small Llamas as GGUF, with scaled rotary frequencies and without, and open them with transformers."""

import gguf
import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig

transformers.logging.set_verbosity_error()
HEADS, WIDTH, LAYERS = 4, 64, 2
SCALED = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64,
    rope_theta=10000.0,
)


def write(file, model, factors):
    """Write a model; queries and keys have the two halves of a head's rows in pairs, as llama.cpp's converter does."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(96)
    for name, tensor in model.state_dict().items():
        path, _, role = name.rpartition(".")
        values = tensor.numpy()
        if path.endswith(("q_proj", "k_proj")):
            values = values.reshape(HEADS, 2, -1, WIDTH).swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(f"{names.get_name(path)}.{role}", np.ascontiguousarray(values))
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def difference(scaling):
    """Return how far the model of the file is from the model that was written, by its logits."""
    config = LlamaConfig(
        vocab_size=96, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        max_position_embeddings=512, rms_norm_eps=1e-5, rope_parameters=scaling, initializer_range=0.15,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    plain = 10000.0 ** -(torch.arange(0, WIDTH // HEADS, 2) / (WIDTH // HEADS))
    factors = plain / model.model.rotary_emb.inv_freq  # what the frequencies are divided by
    write("model.gguf", model, factors if scaling["rope_type"] == "llama3" else None)
    read = AutoModelForCausalLM.from_pretrained(".", gguf_file="model.gguf", dtype=torch.float32).eval()
    ids = torch.arange(200)[None] % 96
    with torch.no_grad():
        expected, got = model(ids).logits, read(ids).logits
    return ((got - expected).norm() / expected.norm()).item()


scaled, plain = difference(SCALED), difference(dict(rope_type="default", rope_theta=10000.0))
print(f"transformers {transformers.__version__}: {scaled:.2g} with scaled frequencies, {plain:.2g} without")
assert scaled > 0.01
assert plain < 1e-5
PY
venv/bin/python read.py 2>/dev/null
