"""Asking a norm for one answer: chosen rows, chosen scale and shift, at whatever precision it has."""

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
        dtype: float64, or float32 for a norm that does not keep to float64.
        plain: the scale and shift with which the standardized row itself comes out; 1 and 0 until found otherwise.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject.drawing_for("diagnosis")
        self.plain: tuple[float, float] = (1.0, 0.0)
        self.dtype = torch.float64
        try:
            self(torch.eye(4, dtype=torch.float64))
        except Unanswered:  # float32 it takes
            self.dtype = torch.float32

    def __call__(
        self,
        x: Float[Tensor, "*dims"],
        scale: float | Tensor | None = None,
        shift: float | Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        eps: float = EPS,
        gradients: bool = False,
    ) -> Float[Tensor, "*dims"]:
        """What comes out for float64 ``x`` (..., C), in float64 on the CPU; scale and shift numbers or (C,) tensors.

        Raises:
            Unanswered: nothing does.
        """
        blank = torch.ones(x.shape[-1], dtype=torch.float64)
        weights = (
            blank * (self.plain[0] if scale is None else scale),
            blank * (self.plain[1] if shift is None else shift),
        )
        dtype = dtype or self.dtype
        try:
            candidate = self.subject.candidate(x.shape[-1], dtype, eps=eps, weights=lambda width, generator: weights)
            with torch.set_grad_enabled(gradients):
                y = candidate(self.subject.put(x, dtype).clone())  # a clone, since it may be written into
            return y.detach().cpu().double()
        except RAISED as error:
            raise Unanswered from error

    def normal(self, *shape: int) -> Tensor:
        """Normal numbers in float64, of a shape (..., C)."""
        return torch.randn(*shape, generator=self.subject.generator, dtype=torch.float64)

    def standard_rows(self, rows: int, width: int) -> Rows:
        """Rows of mean 0 and variance 1."""
        return standardized(self.normal(rows, width), (-1,), eps=0.0)


def standardized(x: Tensor, dims: tuple[int, ...], eps: float = EPS) -> Tensor:
    """(x - mean) / sqrt(var + eps) over ``dims``."""
    centred = x - x.mean(dims, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(dims, keepdim=True) + eps)


def distance(a: Tensor, b: Tensor) -> float:
    """RMS of the difference over RMS of ``b``; infinite where either is not finite."""
    off = ((a - b).square().mean().sqrt() / b.square().mean().sqrt().clamp(min=1e-300)).item()
    return off if off == off else float("inf")


def alike(a: Tensor, b: Tensor, limit: float = NAMED_LIMIT) -> bool:
    """Whether ``a`` is ``b`` to ``limit``."""
    return distance(a, b) <= limit


def rescaled(y: Tensor, target: Tensor) -> Tensor:
    """Each row of ``y`` times the factor that brings it nearest to that of ``target``."""
    return y * (y * target).sum(-1, keepdim=True) / y.square().sum(-1, keepdim=True)


def slope(y: Tensor, x: Tensor) -> Tensor:
    """The factor by which each row of ``x`` comes nearest to that of ``y``: (rows, C), (rows, C) -> (rows,)."""
    return (y * x).sum(-1) / x.square().sum(-1)
