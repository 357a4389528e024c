"""Families of checkpoints, one table a file; a new one is a new table in this list."""

from minigpt.checkpoint.formats.book import BOOK
from minigpt.checkpoint.formats.format import Format, Tensors
from minigpt.checkpoint.formats.hugging_face import HUGGING_FACE
from minigpt.checkpoint.formats.nanogpt import NANOGPT
from minigpt.checkpoint.formats.openai import OPENAI

FORMATS = (OPENAI, BOOK, NANOGPT, HUGGING_FACE)  # the first that recognises the tensors

__all__ = ["BOOK", "FORMATS", "Format", "Tensors", "recognise"]


def recognise(tensors: Tensors) -> Format:
    """The family whose names and layouts these are; Hugging Face where none other is."""
    return next(form for form in FORMATS if form.recognises(tensors))
