"""The names of OpenAI's TensorFlow checkpoint: model/h0/ln_1/g. Linear layers are (1, in, out)."""

from minigpt.checkpoint.formats.format import LINEARS, Format, convolved, same

_BLOCK = "model/h{i}"

OPENAI = Format(
    name="OpenAI (TensorFlow)",
    recognises=lambda tensors: "model/wte" in tensors or "model/h0/ln_1/g" in tensors,
    rows={
        "wte.weight": same("model/wte"),
        "wpe.weight": same("model/wpe"),
        "ln_f.weight": same("model/ln_f/g"),
        "ln_f.bias": same("model/ln_f/b"),
        **{f"h.{{i}}.{norm}.weight": same(f"{_BLOCK}/{norm}/g") for norm in ("ln_1", "ln_2")},
        **{f"h.{{i}}.{norm}.bias": same(f"{_BLOCK}/{norm}/b") for norm in ("ln_1", "ln_2")},
        **{f"h.{{i}}.{name}.weight": convolved(f"{_BLOCK}/{name.replace('.', '/')}/w") for name in LINEARS},
        **{f"h.{{i}}.{name}.bias": same(f"{_BLOCK}/{name.replace('.', '/')}/b") for name in LINEARS},
    },
    fields={
        **{name: name for name in ("n_embd", "n_head", "n_layer")},
        "vocab_size": "n_vocab",
        "n_positions": "n_ctx",
    },
)
