"""The network, nothing else."""

from minigpt.model.cache import KVCache
from minigpt.model.calibrate import calibrate
from minigpt.model.compiled import compile_steps
from minigpt.model.fold import fold_norms
from minigpt.model.gpt2 import GPT2, require_gpt2, require_weights
from minigpt.model.inputs import require_ids, require_known
from minigpt.model.int8 import quantize_int8
from minigpt.model.layout import lay_out
from minigpt.model.swap import match_sites, swap_norms

__all__ = [
    "GPT2",
    "KVCache",
    "calibrate",
    "compile_steps",
    "fold_norms",
    "lay_out",
    "match_sites",
    "quantize_int8",
    "require_gpt2",
    "require_ids",
    "require_known",
    "require_weights",
    "swap_norms",
]
