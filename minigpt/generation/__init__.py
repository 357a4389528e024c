"""Model -> tokens."""

from minigpt.generation.complete import Completion, Prompt, complete
from minigpt.generation.decode import Generated, generate, prompt_ids, stream
from minigpt.generation.processors import warp
from minigpt.generation.settings import GenerationSettings, parse_settings

__all__ = [
    "Completion",
    "Generated",
    "GenerationSettings",
    "Prompt",
    "complete",
    "generate",
    "parse_settings",
    "prompt_ids",
    "stream",
    "warp",
]
