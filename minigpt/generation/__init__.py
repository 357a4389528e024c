"""Generation: from prompts to tokens and text.

Names are imported when they are first used: the command line reads the table of settings without PyTorch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minigpt.generation.choosing import warp
    from minigpt.generation.decode import Completion, Generated, complete, generate, stream
    from minigpt.generation.row import prompt_ids
    from minigpt.generation.settings import GenerationSettings, Options, Settings, TextSettings, parse_settings

_ELSEWHERE = {"warp": "choosing", "prompt_ids": "row"} | dict.fromkeys(
    ("GenerationSettings", "Options", "Settings", "TextSettings", "parse_settings"), "settings"
)

__all__ = [
    "Completion", "Generated", "GenerationSettings", "Options", "Settings", "TextSettings", "complete",
    "generate", "parse_settings", "prompt_ids", "stream", "warp",
]  # fmt: skip

if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'minigpt.generation' has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_ELSEWHERE.get(name, 'decode')}"), name)
