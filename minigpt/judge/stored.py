"""The error of storing: values that another program wrote at a narrow dtype are off by that rounding alone.

T tokens, V vocabulary, C embedding.
"""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

STORED_DTYPES = (torch.bfloat16, torch.float16)  # the coarser one first


class Error(Protocol):
    """A distance or a row distance of ``measures``."""

    def add(self, value: Tensor, truth: Tensor) -> None:
        """Count a pair of equal shape."""


E = TypeVar("E", bound=Error)


class Stored(Generic[E]):
    """Distances of the truth from itself, stored at each narrow dtype that holds all values so far exactly.

    Args:
        dtype: that of the original. One that rounds as much is left out.
        error: makes what counts the distance.
    """

    def __init__(self, dtype: torch.dtype, error: Callable[[], E]) -> None:
        self.errors: dict[torch.dtype, E] = {}
        for narrow in STORED_DTYPES:
            if torch.finfo(narrow).eps > torch.finfo(dtype).eps:
                self.errors[narrow] = error()

    def add(self, value: Float[Tensor, "*rows width"], truth: Float[Tensor, "*rows width"]) -> None:
        """Count values, and the true ones."""
        for narrow in list(self.errors):
            if holds(narrow, value):
                self.errors[narrow].add(truth.to(narrow), truth)
            else:
                del self.errors[narrow]

    @property
    def coarsest(self) -> tuple[torch.dtype, E] | None:
        """The coarsest of these dtypes and the distance; None if there is none."""
        return next(iter(self.errors.items()), None)


def holds(narrow: torch.dtype, value: Tensor) -> bool:
    """Return whether a dtype holds all finite values exactly."""
    for part in (value[:1], value):  # one row tells of most
        back = part.to(narrow).to(part.dtype)
        if not bool(((back == part) | ~part.isfinite()).all()):
            return False
    return True
