"""Generation: from prompts to tokens and text."""

from minigpt.generation.complete import Completion, Prompt, complete
from minigpt.generation.decode import Generated, generate, stream
from minigpt.generation.prompts import prompt_ids
from minigpt.generation.settings import GenerationSettings, Options, Settings, TextSettings, parse_settings
from minigpt.generation.warping import warp

__all__ = [
    "Completion",
    "Generated",
    "GenerationSettings",
    "Options",
    "Prompt",
    "Settings",
    "TextSettings",
    "complete",
    "generate",
    "parse_settings",
    "prompt_ids",
    "stream",
    "warp",
]
