"""Hugging Face transformers. Our names, layouts and config fields are taken from it."""

from minigpt.checkpoint.formats.format import CAUSAL_MASKS, Format

HUGGING_FACE = Format(
    name="Hugging Face",
    recognises=lambda tensors: True,
    buffers=CAUSAL_MASKS,
)
