#!/usr/bin/env bash
# CTranslate2 4.8.5, compute type int8, by oneDNN (the choice on AMD CPUs): without VNNI two neighbouring products are added in
# 16 bits, and the sum is clipped at 32,767. Large activations on large weights lose nearly all of a sum. With VNNI they do not.
# The same file gives other logits on another CPU. MKL (CT2_USE_MKL=1) does not clip.
#
# A model whose embedding and head are all ones has logits of 64, its width. Rounding to eight bits changes nothing of it.
# oneDNN is held to AVX2 by its own variable, so that a CPU with VNNI shows both.
#
# Seen: 0.5059 with AVX2, which is 64 * (32767 / 2 - 128 * 127) / 127**2; and 64 with AVX-512 VNNI.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet ctranslate2==4.8.5 numpy==2.4.6
cd "$place"

cat > product.py <<'PY'
"""Print the logits of a model whose embedding and head are all ones: 64, the width, by any arithmetic that does not clip."""

import ctranslate2
import numpy as np
from ctranslate2.specs import transformer_spec

WIDTH, WORDS = 64, 8


def write(folder):
    """Write a decoder of one layer that adds nothing to its residual stream, with weights of eight bits."""
    spec = transformer_spec.TransformerDecoderModelSpec.from_config(num_layers=1, num_heads=1, no_final_norm=True)
    decoder, layer = spec.decoder, spec.decoder.layer[0]
    attention, feed = layer.self_attention, layer.ffn
    decoder.scale_embeddings = False
    decoder.position_encodings.encodings = np.zeros((8, WIDTH), np.float32)
    decoder.embeddings.weight = decoder.projection.weight = np.ones((WORDS, WIDTH), np.float32)
    for linear, parts in ((attention.linear[0], 3), (attention.linear[1], 1), (feed.linear_0, 1), (feed.linear_1, 1)):
        linear.weight = np.zeros((parts * WIDTH, WIDTH), np.float32)
        linear.bias = np.zeros(parts * WIDTH, np.float32)
    for norm in (attention.layer_norm, feed.layer_norm):
        norm.gamma, norm.beta = np.ones(WIDTH, np.float32), np.zeros(WIDTH, np.float32)
    spec.register_vocabulary([f"t{word}" for word in range(WORDS)])
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "t0"
    spec.validate()
    spec.optimize(quantization="int8")
    spec.save(folder)


write(".")
logits = np.array(ctranslate2.Generator(".", compute_type="int8").forward_batch([[1, 2]]))
assert np.ptp(logits) == 0
print(float(logits[0, 0, 0]))
PY
flags=$(grep -m1 '^flags' /proc/cpuinfo)
echo "ctranslate2 4.8.5 on $(grep -m1 'model name' /proc/cpuinfo | cut -d: -f2-)"
case $flags in *avx2*) ;; *) echo "this CPU has no AVX2: nothing is checked"; exit 0 ;; esac
export CT2_USE_MKL=0
clipped=$(ONEDNN_MAX_CPU_ISA=AVX2 venv/bin/python product.py)
echo "oneDNN with AVX2: $clipped"
case $clipped in 0.5059*) ;; *) exit 1 ;; esac
case $flags in
    *avx512_vnni*)
        whole=$(venv/bin/python product.py)
        echo "oneDNN with AVX-512 VNNI: $whole"
        case $whole in 64.0) ;; *) exit 1 ;; esac
        ;;
    *) echo "this CPU has no AVX-512 VNNI, with which the logits would be 64" ;;
esac
