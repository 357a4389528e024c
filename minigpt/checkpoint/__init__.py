"""Files <-> model."""

from minigpt.checkpoint.generation_config import read_generation_config
from minigpt.checkpoint.locate import TOKENIZER_FILES, config_file, locate
from minigpt.checkpoint.pretrained import from_pretrained, load_norms, save_pretrained
from minigpt.checkpoint.read import read_tensors

__all__ = [
    "TOKENIZER_FILES",
    "config_file",
    "from_pretrained",
    "load_norms",
    "locate",
    "read_generation_config",
    "read_tensors",
    "save_pretrained",
]
