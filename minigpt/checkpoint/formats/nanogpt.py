"""nanoGPT and minGPT: Hugging Face's names, but linear layers are stored (out, in), and biases may be missing.

nanoGPT uses the exact GELU. A model trained before June 2023, or by minGPT, needs a config.json beside it.
"""

import re

from minigpt.checkpoint.formats.format import CAUSAL_MASKS, DROPOUTS, LINEARS, Format, Tensors, transposed

FIRST = "h.0.attn.c_attn.weight"


def _recognises(tensors: Tensors) -> bool:
    """Return True if c_attn is stored (out, in). Its shape tells, since it is never square."""
    shape = tensors[FIRST].shape if FIRST in tensors else ()
    return len(shape) == 2 and shape[0] == 3 * shape[1]


NANOGPT = Format(
    name="nanoGPT",
    recognises=_recognises,
    rows={f"h.{{i}}.{linear}.weight": transposed(f"h.{{i}}.{linear}.weight") for linear in LINEARS},
    buffers=CAUSAL_MASKS,
    may_lack=re.compile(r"(.*\.)?(c_attn|c_proj|c_fc|ln_1|ln_2|ln_f)\.bias"),
    fields={
        **{name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd")},
        "n_positions": "block_size",
        **dict.fromkeys(DROPOUTS, "dropout"),
    },
    ignored=("bias",),
    fixed={"activation_function": "gelu"},
)
