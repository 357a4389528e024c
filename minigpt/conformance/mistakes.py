"""Mistakes of formula and of precision. Each function probes a norm for one kind, and returns what it finds.

``wrong_formula`` asks them from the outside in, since one mistake may hide those behind it.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.conformance.subject import EPS, Subject
from minigpt.conformance.truth import PRECISIONS
from minigpt.errors import RAISED
from minigpt.placement import dtype_name
from minigpt.processor import HALVES

BATCH = "a row depends on its batch"
OTHER_AFFINE = "scale and shift are applied otherwise than in row * scale + shift"
WIDTH = 16
NAMED_LIMIT = 1e-3  # a formula is recognized when it explains the answers to this relative accuracy
ONE_ROUNDING = 0.58  # RMS of one rounding's error over u, for errors spread evenly: 1 / sqrt(3)
FIT_LIMIT = 1e-4  # accept a fit over 18 orders of magnitude below this; float32 arithmetic leaves 1e-6

# Dimensions of (batch, sequence, width) that a norm may use instead of the last
WRONG_DIMENSIONS = {
    (1,): "the sequence",
    (0,): "the batch",
    (0, 1): "batch and sequence",
    (1, 2): "sequence and width together",
    (0, 1, 2): "the whole input",
}


class Probe:
    """The norm as a function of rows, scale and shift."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject.drawing_for("diagnosis")

    @torch.no_grad()
    def __call__(
        self,
        x: Float[Tensor, "*dims"],
        scale: float | Tensor = 1.0,
        shift: float | Tensor = 0.0,
        *,
        dtype: torch.dtype = torch.float32,
        eps: float = EPS,
    ) -> Float[Tensor, "*dims"]:
        """Return the norm of ``x`` (..., C) in float64 on the CPU; scale and shift are numbers or (C,) tensors."""
        blank = torch.ones(x.shape[-1], dtype=torch.float64)
        weights = blank * scale, blank * shift
        candidate = self.subject.candidate(x.shape[-1], dtype, eps=eps, weights=lambda width, generator: weights)
        return candidate(self.subject.put(x, dtype).clone()).cpu().double()  # a clone: it may be written into

    def normal(self, *shape: int) -> Tensor:
        """Return normal numbers in float64 of this shape, (..., C)."""
        return torch.randn(*shape, generator=self.subject.generator, dtype=torch.float64)

    def standard_rows(self, rows: int, width: int) -> Tensor:
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


def wrong_formula(probe: Probe) -> list[str]:
    """Return the mistakes of formula and of precision, most important first."""
    if found := _first(probe, no_number, wrong_dimension):
        return found
    affine = _first(probe, wrong_affine)
    if affine == [OTHER_AFFINE]:
        return affine
    # Without mean or deviation, or in few bits, the divisor and its eps do not show
    if found := _first(probe, other_in_company, wrong_statistics, narrow_statistics):
        return affine + found
    for look in (wrong_divisor, ignored_eps, narrow_half_statistics):
        affine += _first(probe, look)
    return affine


def _first(probe: Probe, *looks: Callable[[Probe], list[str]]) -> list[str]:
    """Return what the first of these looks finds that finds anything. A norm that raises shows nothing."""
    for look in looks:
        try:
            if found := look(probe):
                return found
        except RAISED:
            continue
    return []


def no_number(probe: Probe) -> list[str]:
    """Look for NaN and infinities in the output for ordinary input."""
    y = probe(probe.normal(8, WIDTH))
    if y.isfinite().all():
        return []
    return [f"it returns {'NaN' if y.isnan().any() else 'infinities'} for ordinary rows"]


def other_in_company(probe: Probe) -> list[str]:
    """Look for rows that depend on other rows, by more than rounding."""
    x = probe.normal(8, WIDTH)
    return [] if alike(probe(x), torch.cat([probe(row) for row in x.split(1)])) else [BATCH]


def wrong_dimension(probe: Probe) -> list[str]:
    """Look for a norm over other dimensions than the last of a 3-D input, dividing by n or by n - 1."""
    x = probe.normal(4, 6, WIDTH) * (1 + probe.normal(4, 6, 1).abs()) + probe.normal(4, 6, 1)
    y = probe(x)
    for dims, name in WRONG_DIMENSIONS.items():
        expected, n = standardized(x, dims), math.prod(x.shape[dim] for dim in dims)
        if any(alike(y * factor, expected, 1e-2) for factor in (1.0, math.sqrt(n / (n - 1)))):
            return [f"normalizes over the wrong dimension: over {name} of a (batch, sequence, width) input"]
    return []


def wrong_affine(probe: Probe) -> list[str]:
    """Find how scale and shift are applied."""
    x, scale, shift = probe.normal(8, WIDTH), 1 + 2 * probe.normal(WIDTH), 1 + probe.normal(WIDTH)  # of either sign
    y, unit = probe(x, scale, shift), probe(x)
    explanations = {
        "": unit * scale + shift,
        "the shift is ignored": unit * scale,
        "the scale is ignored": unit + shift,
    }
    found = [mistake for mistake, explained in explanations.items() if alike(y, explained, 1e-2)]
    return [mistake for mistake in found or [OTHER_AFFINE] if mistake]


def wrong_statistics(probe: Probe) -> list[str]:
    """Find out whether the norm uses the mean and the deviation of its row."""
    x = 4 * probe.standard_rows(8, WIDTH)
    y, shifted, stretched, moved = probe(x), probe(x + 2), probe(4 * x), x.clone()
    moved[:, 0] += 3
    if torch.equal(probe(moved)[:, 1:], y[:, 1:]):
        return ["each value is computed by itself, without the mean and the deviation of its row"]
    found = []
    if not alike(shifted, y, 0.05):
        is_rms = alike(shifted, torch.nn.functional.rms_norm(x + 2, (WIDTH,), eps=EPS))
        found.append("the mean is not subtracted" + " (it is an RMSNorm)" * is_rms)
    if alike(stretched, y / 4, 0.05):
        found.append("it divides by the variance: a square root is missing")
    elif not alike(stretched, y, 0.05):
        found.append("it does not divide by the row's own deviation: four times the row gives another result")
    return found


def wrong_divisor(probe: Probe) -> list[str]:
    """Fit the divisor q of rows of variance v from 1e-12 to 1e6: sqrt(a v + eps), or sqrt(a v) + eps."""
    variance = torch.logspace(-12, 6, 37, dtype=torch.float64)  # (37,)
    x = variance.sqrt()[:, None] * probe.standard_rows(37, WIDTH)  # (37, C)
    y = probe(x)
    divisor = x.square().sum(-1) / (y * x).sum(-1)  # (37,), of the best fit of y to x / divisor
    factor = (divisor[-1].square() / variance[-1]).item()
    least = (factor * variance[0]).item()
    inside = max(divisor[0].item() ** 2 - least, 0.0)
    outside = max(divisor[0].item() - math.sqrt(least), 0.0)
    if alike(torch.sqrt(factor * variance + inside) / divisor, torch.ones_like(divisor), FIT_LIMIT):
        return _wrong_factor(factor) + _wrong_eps(inside)
    if alike((torch.sqrt(factor * variance) + outside) / divisor, torch.ones_like(divisor), FIT_LIMIT):
        added = "eps is added to the deviation, not to the variance"
        return [*_wrong_factor(factor), added, *_wrong_eps(outside)]
    return []


def _wrong_factor(factor: float) -> list[str]:
    if abs(factor - 1) < NAMED_LIMIT:
        return []
    if abs(factor * (WIDTH - 1) / WIDTH - 1) < NAMED_LIMIT:
        return ["variance divides by n - 1"]
    return [f"variance is {factor:.4g} times what it should be"]


def _wrong_eps(eps: float) -> list[str]:
    if eps < 1e-15:
        return ["eps is left out"]
    return [] if abs(eps / EPS - 1) < 0.05 else [f"eps looks like {eps:.2g}, not {EPS:g}"]


def ignored_eps(probe: Probe) -> list[str]:
    """Find out whether another eps changes nothing, in rows so small that it should."""
    if not probe.subject.takes_eps:
        return []
    x = EPS / 10 * probe.standard_rows(8, WIDTH)  # smaller than eps, of the variance or of the deviation
    y = probe(x)  # all zeros if such rows are rounded away; they show nothing
    return ["the eps it is given is ignored"] if y.any() and torch.equal(probe(x, eps=100 * EPS), y) else []


# Precision. LayerNorm does not change if a row is shifted or stretched (arXiv 1607.06450, section 5.1). Only the
# rounding changes, which shows in how many bits a norm computes.


def narrow_statistics(probe: Probe) -> list[str]:
    """Look for statistics of float32 rows in fewer bits than float32 has, or lost in a difference of squares."""
    near, far = (shift_rounding(probe, shift, torch.float32) for shift in (64.0, 1024.0))
    off = max(near, stretch_rounding(probe))
    if 2**-14 <= off < 2**-5:  # one rounding leaves 2^-11 in float16, 2^-8 in bfloat16
        return [f"statistics are kept in {'float16' if off < 2**-9.5 else 'bfloat16'}, or in as few bits"]
    # With two passes or Welford, rounding grows as the shift; here it grows as its square
    if far > 100 * 2**-24 and 5 * near < far < 60 * near:
        return ["variance is a difference of squares, E[x^2] - E[x]^2, which cancels where the mean is large"]
    return []


def narrow_half_statistics(probe: Probe) -> list[str]:
    """Look for statistics of float16 or bfloat16 rows in that dtype."""
    narrow = {dtype: PRECISIONS[dtype].result / 8 for dtype in HALVES}
    return [kept_in(dtype) for dtype, least in narrow.items() if shift_rounding(probe, 64.0, dtype) >= least]


def late_affine(probe: Probe) -> list[str]:
    """Find out whether scale and shift are applied after the cast to half precision, which rounds up to three times.

    PyTorch's layer_norm applies them in float32 and rounds once. Both are within the bound of rounding, so this is a
    remark on a norm, and not a failure. In a model, such a norm has other bits than the one that it was trained with.
    """
    try:
        late = " and ".join(dtype_name(dtype) for dtype in HALVES if _rounds_before_affine(probe, dtype))
    except RAISED:
        return []
    said = f"In {late}, scale and shift are applied after the cast, so the result is rounded more than once"
    return [f"{said}. PyTorch's layer_norm applies them in float32 and rounds once."] if late else []


def _rounds_before_affine(probe: Probe, dtype: torch.dtype) -> bool:
    def rounded(y: Tensor) -> Tensor:
        return y.to(dtype).double()

    x, scale, shift = (rounded(probe.normal(*shape)) for shape in ((64, 64), (64,), (64,)))
    y, standard = probe(x, scale, shift, dtype=dtype), standardized(x, (-1,))
    cast = rounded(standard)
    once = rounded(standard * scale + shift)
    late = (rounded(rounded(cast * scale) + shift), rounded(cast * scale + shift))  # two operations, or one
    share = [(y == expected).double().mean().item() for expected in (once, *late)]
    return max(share[1:]) > max(0.9, share[0])


def kept_in(dtype: torch.dtype) -> str:
    """Return the diagnosis of statistics in the dtype of the input."""
    return f"statistics are kept in {dtype_name(dtype)} for {dtype_name(dtype)} input"


def shift_rounding(probe: Probe, shift: float, dtype: torch.dtype) -> float:
    """Return how much a shift of the row, itself exact at ``dtype``, changes the result, relative to the shift."""
    if dtype == torch.float32:
        spacing, steps = 2**-10, 2**10  # a deviation of 1, in steps that float32 still holds beside the shift
    else:
        spacing, steps = shift * torch.finfo(dtype).eps, 2  # the finest steps that this dtype holds beside the shift
    x = spacing * (steps * probe.normal(16, 64)).round()
    off = distance(probe(x + shift, dtype=dtype), probe(x, dtype=dtype))
    return off * x.std(-1, correction=0).mean().item() / shift / ONE_ROUNDING


def stretch_rounding(probe: Probe) -> float:
    """Return how much a stretch of the row changes the result."""
    x = 10 * probe.standard_rows(1, 64).expand(16, 64)
    stretched = x * torch.linspace(1, 2, 16, dtype=torch.float64)[:, None]
    return distance(probe(stretched), probe(x)) / ONE_ROUNDING
