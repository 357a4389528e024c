"""Files <-> model."""

from minigpt.checkpoint.contents import Files, holds_model, local_place, read_stable
from minigpt.checkpoint.pretrained import load_norms
from minigpt.checkpoint.read import Checkpoint, read_checkpoint

__all__ = [
    "Checkpoint", "Files", "holds_model", "load_norms", "local_place", "read_checkpoint", "read_stable",
]  # fmt: skip
