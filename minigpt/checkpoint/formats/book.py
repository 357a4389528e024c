"""The names of the book "Build a Large Language Model (From Scratch)": trf_blocks, W_query, scale and shift.

Queries, keys and values are three linear layers, each (out, in), with or without a bias.
"""

import re

from minigpt.checkpoint.formats.format import DROPOUTS, Format, same, transposed

_BLOCK = "trf_blocks.{i}"
_QKV = tuple(f"{_BLOCK}.att.W_{part}" for part in ("query", "key", "value"))

BOOK = Format(
    name="book (trf_blocks)",
    recognises=lambda tensors: "tok_emb.weight" in tensors or "trf_blocks.0.norm1.scale" in tensors,
    rows={
        "wte.weight": same("tok_emb.weight"),
        "wpe.weight": same("pos_emb.weight"),
        "h.{i}.ln_1.weight": same(f"{_BLOCK}.norm1.scale"),
        "h.{i}.ln_1.bias": same(f"{_BLOCK}.norm1.shift"),
        "h.{i}.attn.c_attn.weight": transposed(*(f"{linear}.weight" for linear in _QKV)),
        "h.{i}.attn.c_attn.bias": same(*(f"{linear}.bias" for linear in _QKV)),
        "h.{i}.attn.c_proj.weight": transposed(f"{_BLOCK}.att.out_proj.weight"),
        "h.{i}.attn.c_proj.bias": same(f"{_BLOCK}.att.out_proj.bias"),
        "h.{i}.ln_2.weight": same(f"{_BLOCK}.norm2.scale"),
        "h.{i}.ln_2.bias": same(f"{_BLOCK}.norm2.shift"),
        "h.{i}.mlp.c_fc.weight": transposed(f"{_BLOCK}.ff.layers.0.weight"),
        "h.{i}.mlp.c_fc.bias": same(f"{_BLOCK}.ff.layers.0.bias"),
        "h.{i}.mlp.c_proj.weight": transposed(f"{_BLOCK}.ff.layers.2.weight"),
        "h.{i}.mlp.c_proj.bias": same(f"{_BLOCK}.ff.layers.2.bias"),
        "ln_f.weight": same("final_norm.scale"),
        "ln_f.bias": same("final_norm.shift"),
        "lm_head.weight": same("out_head.weight"),
    },
    buffers=re.compile(r"trf_blocks\.\d+\.att\.mask"),
    may_lack=re.compile(r"h\.\d+\.attn\.c_attn\.bias"),
    fields={
        "vocab_size": "vocab_size",
        "n_positions": "context_length",
        "n_embd": "emb_dim",
        "n_head": "n_heads",
        "n_layer": "n_layers",
        **dict.fromkeys(DROPOUTS, "drop_rate"),
    },
    ignored=("qkv_bias",),
)
