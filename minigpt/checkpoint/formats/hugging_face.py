"""Hugging Face transformers: names, layouts and config are ours, for we have taken them from there. Nothing to do."""

from minigpt.checkpoint.formats.format import CAUSAL_MASKS, Format

HUGGING_FACE = Format(
    name="Hugging Face",
    recognises=lambda tensors: True,
    buffers=CAUSAL_MASKS,
)
