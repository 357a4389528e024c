"""Files <-> model."""

from minigpt.checkpoint.contents import (
    TOKENIZER_FILES,
    config_file,
    folder_of,
    generation_fields,
    has_tokenizer,
    holds_model,
    read_tensors,
    weight_files,
)  # fmt: skip
from minigpt.checkpoint.opened import Checkpoint, open_checkpoint
from minigpt.checkpoint.place import local_place
from minigpt.checkpoint.pretrained import load_norms
from minigpt.checkpoint.save import save_pretrained

__all__ = [
    "TOKENIZER_FILES",
    "Checkpoint",
    "config_file",
    "folder_of",
    "generation_fields",
    "has_tokenizer",
    "holds_model",
    "load_norms",
    "local_place",
    "open_checkpoint",
    "read_tensors",
    "save_pretrained",
    "weight_files",
]  # fmt: skip
