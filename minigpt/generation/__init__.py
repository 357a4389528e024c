"""Model -> tokens."""

from minigpt.generation.decode import decode, generate, prompt_ids, stream
from minigpt.generation.processors import warp
from minigpt.generation.settings import GenerationSettings

__all__ = ["GenerationSettings", "decode", "generate", "prompt_ids", "stream", "warp"]
