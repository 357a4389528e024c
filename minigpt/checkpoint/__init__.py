"""Files <-> model."""

from minigpt.checkpoint.contents import Files, holds_model, local_place
from minigpt.checkpoint.opened import Checkpoint, open_checkpoint
from minigpt.checkpoint.pretrained import load_norms
from minigpt.checkpoint.save import save_pretrained

__all__ = ["Checkpoint", "Files", "holds_model", "load_norms", "local_place", "open_checkpoint", "save_pretrained"]
