"""Families of checkpoints, one table a file.

To add a family, write ``formats/NAME.py`` with a ``Format`` called NAME in capitals, and add its name to FAMILIES. A
tensor that is in no row keeps its name, so a family that names GPT-2's parts as we do needs rows for the others only::

    from minigpt.checkpoint.formats.format import LINEARS, Format, same, transposed

    MINE = Format(
        name="mine",
        recognises=lambda tensors: "embed.weight" in tensors,
        rows={
            "wte.weight": same("embed.weight"),
            **{f"h.{{i}}.{name}.weight": transposed(f"h.{{i}}.{name}.weight") for name in LINEARS},
        },
    )
"""

import importlib

from minigpt.checkpoint.formats.format import HUGGING_FACE, Format, Tensors

FAMILIES = ("openai", "book", "nanogpt")  # the first that recognises the tensors is used; Hugging Face is the last
FORMATS: list[Format] = [
    *(getattr(importlib.import_module(f"{__name__}.{name}"), name.upper()) for name in FAMILIES),
    HUGGING_FACE,
]


def recognise(tensors: Tensors) -> Format:
    """Return the family that the tensors belong to; Hugging Face if no other recognises them."""
    return next(form for form in FORMATS if form.recognises(tensors))
