"""Hugging Face transformers: names, layouts and config are ours, for we have taken them from there. Nothing to do."""

from minigpt.checkpoint.formats.format import Format

HUGGING_FACE = Format(
    name="Hugging Face",
    recognises=lambda tensors: True,
    buffers=("h.{i}.attn.bias", "h.{i}.attn.masked_bias"),  # causal masks, saved by early versions
)
