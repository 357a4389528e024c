"""Families of checkpoints, one table a file.

To add a family, write ``formats/NAME.py`` with a ``Format``, and add it to FORMATS::

    from minigpt.checkpoint.formats.format import Format, same, transposed

    MINE = Format(
        name="mine",
        recognises=lambda tensors: "embed.weight" in tensors,
        rows={"wte.weight": same("embed.weight"), "h.{i}.mlp.c_fc.weight": transposed("blocks.{i}.up.weight")},
    )
"""

from minigpt.checkpoint.formats.book import BOOK
from minigpt.checkpoint.formats.format import Format, Tensors
from minigpt.checkpoint.formats.hugging_face import HUGGING_FACE
from minigpt.checkpoint.formats.nanogpt import NANOGPT
from minigpt.checkpoint.formats.openai import OPENAI

FORMATS = (OPENAI, BOOK, NANOGPT, HUGGING_FACE)  # the first that recognises the tensors is used

__all__ = ["BOOK", "FORMATS", "Format", "Tensors", "recognise"]


def recognise(tensors: Tensors) -> Format:
    """Return the family that the tensors belong to; Hugging Face if no other recognises them."""
    return next(form for form in FORMATS if form.recognises(tensors))
