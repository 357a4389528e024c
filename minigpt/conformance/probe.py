"""Ask a norm for one answer, with chosen rows, scale and shift."""

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.conformance.subject import EPS, Subject
from minigpt.errors import RAISED

Rows = Float[Tensor, "rows width"]

NAMED_LIMIT = 1e-3  # a formula is recognized when it explains the answers to this relative accuracy


class Unanswered(Exception):
    """The norm cannot be built for a probe, or raises on it."""


class Probe:
    """The norm as a function of rows, scale and shift.

    Attributes:
        plain: the scale and shift for which the norm returns the standardized row; 1 and 0 until found otherwise.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject.drawing_for("diagnosis")
        self.plain: tuple[float, float] = (1.0, 0.0)

    @torch.no_grad()
    def __call__(
        self,
        x: Float[Tensor, "*dims"],
        scale: float | Tensor | None = None,
        shift: float | Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        eps: float = EPS,
    ) -> Float[Tensor, "*dims"]:
        """Return the norm of ``x`` (..., C) in float64 on the CPU; scale and shift are numbers or (C,) tensors.

        Raises:
            Unanswered: if the norm cannot be built, or raises.
        """
        blank = torch.ones(x.shape[-1], dtype=torch.float64)
        weights = (
            blank * (self.plain[0] if scale is None else scale),
            blank * (self.plain[1] if shift is None else shift),
        )
        try:
            candidate = self.subject.candidate(x.shape[-1], dtype, eps=eps, weights=lambda width, generator: weights)
            return candidate(self.subject.put(x, dtype).clone()).cpu().double()  # a clone: it may be written into
        except RAISED as error:
            raise Unanswered from error

    def normal(self, *shape: int) -> Tensor:
        """Return normal numbers in float64 of this shape, (..., C)."""
        return torch.randn(*shape, generator=self.subject.generator, dtype=torch.float64)

    def standard_rows(self, rows: int, width: int) -> Rows:
        """Return rows of mean 0 and variance 1."""
        return standardized(self.normal(rows, width), (-1,), eps=0.0)


def standardized(x: Tensor, dims: tuple[int, ...], eps: float = EPS) -> Tensor:
    """Return (x - mean) / sqrt(var + eps) over ``dims``."""
    centred = x - x.mean(dims, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(dims, keepdim=True) + eps)


def distance(a: Tensor, b: Tensor) -> float:
    """Return RMS(a - b) / RMS(b); infinite if either is not finite."""
    off = ((a - b).square().mean().sqrt() / b.square().mean().sqrt().clamp(min=1e-300)).item()
    return off if off == off else float("inf")


def alike(a: Tensor, b: Tensor, limit: float = NAMED_LIMIT) -> bool:
    """Return True if ``a`` equals ``b`` to a relative accuracy of ``limit``."""
    return distance(a, b) <= limit


def slope(y: Tensor, x: Tensor) -> Tensor:
    """Return the factor for which each row of ``x`` fits that of ``y`` best: (rows, C), (rows, C) -> (rows,)."""
    return (y * x).sum(-1) / x.square().sum(-1)
