"""minigpt: a GPT-2 small enough to read and exact enough to trust, with a LayerNorm that you can swap.

Names are imported when they are first used, so that ``minigpt --help`` does not wait for PyTorch.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from minigpt import engine, generation, hf, model, norms, serve, swap, testing
    from minigpt.checkpoint import load_norms, save_pretrained
    from minigpt.config import GPT2Config
    from minigpt.errors import CheckpointError, ConfigError, GenerationError, MiniGPTError, NormError
    from minigpt.generation import generate, stream
    from minigpt.host import norm_sites
    from minigpt.judge.original import Original, parity
    from minigpt.judge.perplexity import perplexity
    from minigpt.model import GPT2, KVCache
    from minigpt.norms import LayerNorm
    from minigpt.recipe import Recipe, from_pretrained
    from minigpt.report.parity_report import ParityReport
    from minigpt.swap import center_writers, fit_norms, fold_norms, swap_norms
    from minigpt.tokenizer import Tokenizer

_HOMES = {
    "checkpoint": ("load_norms", "save_pretrained"),
    "config": ("GPT2Config",),
    "errors": ("CheckpointError", "ConfigError", "GenerationError", "MiniGPTError", "NormError"),
    "generation": ("generate", "stream"),
    "host": ("norm_sites",),
    "judge.original": ("Original", "parity"),
    "report.parity_report": ("ParityReport",),
    "judge.perplexity": ("perplexity",),
    "model": ("GPT2", "KVCache"),
    "norms": ("LayerNorm",),
    "recipe": ("Recipe", "from_pretrained"),
    "swap": ("center_writers", "fit_norms", "fold_norms", "swap_norms"),
    "tokenizer": ("Tokenizer",),
}
_MODULES = (
    "bench", "conformance", "engine", "generation", "hf", "judge", "model", "norms", "serve", "study", "swap",
    "testing",
)  # fmt: skip

__all__ = [
    "GPT2", "CheckpointError", "ConfigError", "GPT2Config", "GenerationError", "KVCache", "LayerNorm", "MiniGPTError",
    "NormError", "Original", "ParityReport", "Recipe", "Tokenizer", "center_writers", "engine",
    "fit_norms", "fold_norms", "from_pretrained", "generate", "generation", "hf", "load_norms", "model", "norm_sites",
    "norms", "parity", "perplexity", "save_pretrained", "serve", "stream", "swap", "swap_norms", "testing",
]  # fmt: skip


if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"minigpt.{name}")
        for home, names in _HOMES.items():
            if name in names:
                return getattr(importlib.import_module(f"minigpt.{home}"), name)
        raise AttributeError(f"module 'minigpt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
