"""A loaded model made ready to write much, in little memory."""

import contextlib
import ctypes
import math

from torch import Tensor

from minigpt.checkpoint.pages import MappedFiles
from minigpt.engine.layout import lay_out
from minigpt.model.gpt2 import GPT2


def ready_to_write(model: GPT2, tokens: int = 1, steps: float = math.inf) -> GPT2:
    """``lay_out`` for so many tokens at a time, with as little memory as it takes; return ``model``.

    Raises:
        ConfigError: the arithmetic is "reference", whose bits depend on the layout.
    """
    files = MappedFiles()

    def let_go(weight: Tensor) -> None:
        files.give_back(weight)
        _trim()  # what each copy was made by is in holes too small for the next

    lay_out(model, tokens, let_go, steps)
    _trim()
    return model


def _trim() -> None:
    """Give back what is free, where it is glibc that keeps it."""
    with contextlib.suppress(TypeError, AttributeError):  # another system, another library
        ctypes.CDLL(None).malloc_trim(0)
