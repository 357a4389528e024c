"""minigpt: a GPT-2 small enough to read and exact enough to trust, with a LayerNorm that you can swap.

Names are imported when they are first used, so that ``minigpt --help`` does not wait for PyTorch.
"""

import importlib

from minigpt.version import __version__ as __version__

TYPE_CHECKING = False  # as type checkers know it; ``typing`` takes longer to import than all else here

if TYPE_CHECKING:
    from minigpt import engine, engines, generation, hf, model, norms, serve, swap, testing
    from minigpt.checkpoint import load_norms
    from minigpt.checkpoint.save import save_pretrained
    from minigpt.config import GPT2Config
    from minigpt.conformance import check_norm
    from minigpt.errors import CheckpointError, ConfigError, GenerationError, MiniGPTError, NormError
    from minigpt.generation import generate, stream
    from minigpt.host import norm_sites
    from minigpt.judge.look import site_statistics
    from minigpt.judge.original import Original, parity
    from minigpt.model import GPT2, KVCache
    from minigpt.norms import LayerNorm
    from minigpt.recipe import Recipe, from_pretrained
    from minigpt.report.parity_report import ParityReport
    from minigpt.scoring import perplexity
    from minigpt.swap import center_writers, fit_norms, fold_norms, swap_norms
    from minigpt.tokenizer import Tokenizer

# The public names by the file that each is imported from, in the order of the imports above.
_HOMES = {
    "checkpoint": "load_norms",
    "checkpoint.save": "save_pretrained",
    "config": "GPT2Config",
    "conformance": "check_norm",
    "errors": "CheckpointError ConfigError GenerationError MiniGPTError NormError",
    "generation": "generate stream",
    "host": "norm_sites",
    "judge.look": "site_statistics",
    "judge.original": "Original parity",
    "model": "GPT2 KVCache",
    "norms": "LayerNorm",
    "recipe": "Recipe from_pretrained",
    "report.parity_report": "ParityReport",
    "scoring": "perplexity",
    "swap": "center_writers fit_norms fold_norms swap_norms",
    "tokenizer": "Tokenizer",
}
_NAMES = {name: home for home, names in _HOMES.items() for name in names.split()}
_ROOMS = "bench conformance engine engines generation hf judge model norms serve study swap testing"

if not TYPE_CHECKING:  # a type checker would take any name for one of ours
    __all__ = sorted({*_NAMES, "engine", "engines", "generation", "hf", "model", "norms", "serve", "swap", "testing"})

    def __getattr__(name: str) -> object:
        if name in _ROOMS.split():
            return importlib.import_module(f"minigpt.{name}")
        if name in _NAMES:
            return getattr(importlib.import_module(f"minigpt.{_NAMES[name]}"), name)
        raise AttributeError(f"module 'minigpt' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return __all__
