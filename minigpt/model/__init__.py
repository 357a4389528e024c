"""The network, and nothing else."""

from minigpt.model.cache import KVCache
from minigpt.model.gpt2 import GPT2, Block

__all__ = ["GPT2", "Block", "KVCache"]
