"""The positions of the rows that a model reads now, for a norm that treats a position in a way of its own."""

import threading

from jaxtyping import Int
from torch import Tensor


class _Reading(threading.local):  # each thread reads with its own model
    position_ids: Tensor | None = None


_READING = _Reading()


class AtPositions:
    """Lets norms know the positions of the rows that they get inside a ``with`` block.

    Args:
        position_ids: (B, T) or (1, T).
    """

    def __init__(self, position_ids: Int[Tensor, "rows seq"]) -> None:
        self.position_ids = position_ids
        self.outer: Tensor | None = None

    def __enter__(self) -> None:
        self.outer = _READING.position_ids
        _READING.position_ids = self.position_ids

    def __exit__(self, *error: object) -> None:
        _READING.position_ids = self.outer


def current_positions() -> Int[Tensor, "rows seq"] | None:
    """Return the positions (B, T) or (1, T) of the rows that are read now; None if no model says them."""
    return _READING.position_ids
