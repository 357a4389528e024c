"""The mistakes that people make in a GPT-2, and those that can be made in any language model.

Each is a function under a decorator with its words. A file adds its mistakes to a table as it is imported.
"""

from collections.abc import Iterator
from typing import Any

from minigpt.judge.mistakes import attention, blocks, configs, heads, parts, rounding, text, weights  # noqa: F401
from minigpt.judge.mistakes.mistake import OF_ANY, OF_GPT2, OF_OTHER, Mistake, MistakePart, Swaps
from minigpt.judge.mistakes.norms import wrong_norms
from minigpt.judge.mistakes.rounding import rounded_matrices
from minigpt.offload import is_offloaded
from minigpt.shape import Shape

__all__ = ["Mistake", "MistakePart", "Swaps", "mistakes_of"]


def mistakes_of(model: Any) -> Iterator[Mistake]:
    """Yield the mistakes that can be put into a model.

    Args:
        model: a ``minigpt.GPT2`` in float64 and reference arithmetic; or a model of transformers, which computes with
            another config, and other parts.
    """
    yield from wrong_norms(model)
    for make in OF_ANY:
        yield from make(Shape.of(model.config))
    if hasattr(model, "norm_modules"):
        for make in OF_GPT2:
            yield from make(model.config)
    else:
        yield from rounded_matrices()
        if not any(map(is_offloaded, model.modules())):  # the weights must be in memory
            for make in OF_OTHER:
                yield from make(model)
