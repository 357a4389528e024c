"""Mistakes of formula and of precision. Each function probes a norm for one kind, and returns what it finds."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.conformance.probe import NAMED_LIMIT, Probe, alike, distance, rescaled, slope, standardized
from minigpt.conformance.subject import EPS
from minigpt.conformance.truth import PRECISIONS
from minigpt.placement import dtype_name

MISPLACED = "normalizes over the wrong dimension"
BATCH = "a row depends on its batch"

WIDTH = 16
ROWS, LONG_WIDTH = 16, 64
FLOAT16 = PRECISIONS[torch.float16].result  # u
BFLOAT16 = PRECISIONS[torch.bfloat16].result
APPROXIMATE = 16 * 2**-24  # beyond float32's own rounding
ONE_ROUNDING = 0.58  # RMS of one rounding's error over u, for errors spread evenly: 1 / sqrt(3)
FIT_LIMIT = 1e-4  # accept a fit over 18 orders of magnitude below this; float32 arithmetic leaves 1e-6
Column = Float[Tensor, " rows"]

# Dimensions of (batch, sequence, width) that a norm may use instead of the last
WRONG_DIMENSIONS = {
    (1,): "the sequence",
    (0,): "the batch",
    (0, 1): "batch and sequence",
    (1, 2): "sequence and width together",
    (0, 2): "batch and width together",
    (0, 1, 2): "the whole input",
}


def no_number(probe: Probe) -> list[str]:
    """Look for NaN and infinities in the output for ordinary input."""
    y = probe(probe.normal(8, WIDTH))
    if y.isfinite().all():
        return []
    return [f"it returns {'NaN' if y.isnan().any() else 'infinities'} for ordinary rows"]


def other_without_gradients(probe: Probe) -> list[str]:
    """Look for values that depend on whether gradients are kept. No other probe keeps them."""
    x = probe.normal(8, WIDTH)
    if alike(probe(x), probe(x, gradients=True), FIT_LIMIT):
        return []
    return ["it gives other values without gradients than with them"]


def other_in_company(probe: Probe) -> list[str]:
    """Look for rows that depend on other rows, by more than rounding."""
    x = probe.normal(8, WIDTH)
    return [] if alike(probe(x), torch.cat([probe(row) for row in x.split(1)])) else [BATCH]


def wrong_dimension(probe: Probe) -> list[str]:
    """Look for a norm over other dimensions than the last, of 3-D or 2-D input, or over parts of the last."""
    x = probe.normal(4, 6, WIDTH) * (1 + probe.normal(4, 6, 1).abs()) + probe.normal(4, 6, 1)
    y = probe(x)
    for dims, name in WRONG_DIMENSIONS.items():
        if _is_over(y, x, dims):
            return [f"{MISPLACED}: over {name} of a (batch, sequence, width) input"]
    rows = x.view(24, WIDTH)
    if any(_is_over(probe(rows), rows, dims) for dims in ((0,), (0, 1))):
        return [f"{MISPLACED}: over the rows of a 2-D input"]
    x = probe.normal(8, 64)
    for parts in (2, 4, 8):
        if alike(probe(x), standardized(x.view(8, parts, -1), (-1,)).view(8, 64), 1e-2):
            return [f"{MISPLACED}: over {parts} parts of a row of 64, each by itself"]
    return []


def _is_over(y: Tensor, x: Tensor, dims: tuple[int, ...]) -> bool:
    """Return True if ``y`` is ``x`` standardized over ``dims``, dividing by n or by n - 1."""
    expected, n = standardized(x, dims), math.prod(x.shape[dim] for dim in dims)
    return any(alike(y * factor, expected, 1e-2) for factor in (1.0, math.sqrt(n / (n - 1))))


def wrong_affine(probe: Probe) -> list[str]:
    """Find how scale and shift are applied. Set ``probe.plain`` to those that give the standardized row itself."""
    x, scale, shift = probe.normal(8, WIDTH), 1 + 2 * probe.normal(WIDTH), 1 + probe.normal(WIDTH)  # of either sign
    y, unit, zero, shifted = probe(x, scale, shift), probe(x, 1.0, 0.0), probe(x, 0.0, 0.0), probe(x, 0.0, 1.0)
    explanations: dict[str, tuple[Tensor, tuple[float, float]]] = {
        "": (unit * scale + shift, (1.0, 0.0)),
        "the shift is ignored": (unit * scale, (1.0, 0.0)),
        "the scale is ignored": (unit + shift, (1.0, 0.0)),
        "the scale is ignored, and so is the shift": (unit, (1.0, 0.0)),
        "scale and shift are exchanged": (shifted * shift + scale, (0.0, 1.0)),
        "the scale is added to 1": (zero * (1 + scale) + shift, (0.0, 0.0)),
        "the shift is added before the scale": ((unit + shift) * scale, (1.0, 0.0)),
        "the shift is subtracted": (unit * scale - shift, (1.0, 0.0)),
    }
    for mistake, (explained, plain) in explanations.items():
        if alike(y, explained):
            probe.plain = plain
            return [mistake] if mistake else []
    if not alike(unit, standardized(x, (-1,))):
        return []
    applied = {"scale": alike(probe(x, scale, 0.0), unit * scale), "shift": alike(probe(x, 1.0, shift), unit + shift)}
    wrong = " and the ".join(name for name, rightly in applied.items() if not rightly) or "two together"
    are = "are" if " " in wrong else "is"
    return [f"with scale 1 and shift 0 it is right, but the {wrong} {are} applied otherwise"]


def wrong_statistics(probe: Probe) -> list[str]:
    """Find out whether the norm uses the mean and the deviation of its row."""
    if _is_elementwise(probe):
        return ["each value is computed by itself: neither the mean nor the deviation of its row enters"]
    return _wrong_mean(probe) + (_wrong_scaling(probe) or _other_deviation(probe))


def wrong_deviation(probe: Probe) -> list[str]:
    """Fit the divisor of rows of variance 1e-12 to 1e6: its factor, its eps, and where the eps is added."""
    variance = torch.logspace(-12, 6, 37, dtype=torch.float64)  # (37,)
    x = variance.sqrt()[:, None] * probe.standard_rows(1, WIDTH)  # (37, C)
    y = probe(x)
    divisor = 1 / slope(y, x)  # (37,)
    deviation = variance.sqrt()[:, None]  # (37, 1)
    if not alike(y * divisor[:, None] / deviation, x / deviation):
        return ["the result is no multiple of the centred row"]
    factor = (divisor[-1].square() / variance[-1]).item()
    fits = []
    for deviation in _DEVIATIONS:
        constant = max(deviation.constant(divisor[0].item(), variance[0].item(), factor), 0.0)
        explained = deviation.divisor(variance, factor, constant)
        fits.append((distance(explained / divisor, torch.ones_like(divisor)), constant, deviation))
    off, constant, deviation = min(fits, key=lambda fit: fit[0])
    if off > FIT_LIMIT:
        return []
    if deviation is LEAST_VARIANCE and abs(math.log(constant**0.5 / EPS)) < abs(math.log(constant / EPS)):
        constant, deviation = constant**0.5, LEAST_DEVIATION  # the same function; its eps tells which was meant
    return _wrong_factor(factor) + _wrong_eps(constant, deviation)


def ignored_eps(probe: Probe) -> list[str]:
    """Find out whether another eps changes nothing, in rows so small that it should."""
    if not probe.subject.takes_eps:
        return []
    x = EPS / 10 * probe.standard_rows(8, WIDTH)  # smaller than eps, of the variance or of the deviation
    y = probe(x)  # all zeros if such rows are rounded away; they show nothing
    return ["the eps it is given is ignored"] if y.any() and torch.equal(probe(x, eps=100 * EPS), y) else []


def _is_elementwise(probe: Probe) -> bool:
    x = probe.normal(8, WIDTH)
    moved = x.clone()
    moved[:, 0] += 3
    return torch.equal(probe(moved)[:, 1:], probe(x)[:, 1:])


def _wrong_mean(probe: Probe) -> list[str]:
    x = probe.standard_rows(8, WIDTH)
    moved = x + 2
    y = probe(moved)
    if alike(y, probe(x), 0.05):
        return []
    if alike(y, slope(y, moved)[:, None] * moved):
        about_zero = alike(1 / slope(y, moved), torch.sqrt(moved.square().mean(-1) + EPS))
        return ["the mean is not subtracted" + (" (it is an RMSNorm)" if about_zero else "")]
    if alike(y, slope(y, x)[:, None] * x):
        return ["the variance is taken about 0, not about the mean"]
    return ["the mean is not removed: a number added to a whole row changes what comes out"]


def _wrong_scaling(probe: Probe) -> list[str]:
    x = 4 * probe.standard_rows(8, WIDTH)
    y, stretched = probe(x), probe(4 * x)
    if alike(stretched, y, 0.05):
        return []
    if alike(stretched, 4 * y):
        return ["it does not divide by the row's own deviation: four times the row gives four times the result"]
    if alike(stretched, y / 4, 0.05):
        return ["it divides by the variance: a square root is missing"]
    if alike(stretched, 2 * y, 0.05):
        return ["it divides by the root of the deviation: a square root too many"]
    return ["it does not rescale by the row's deviation: four times the row gives another result"]


def _other_deviation(probe: Probe) -> list[str]:
    x = 4 * probe.standard_rows(8, WIDTH)
    y = probe(x)
    scaled = slope(y, x)  # (8,), alike if by the root mean square of the row, which is 4
    if alike(y, scaled[:, None] * x) and not alike(scaled, scaled.mean().expand(8)):
        return ["it divides by something else than the root mean square: rows of one variance are scaled otherwise"]
    return []


class _Deviation(NamedTuple):
    """A possible divisor q(v) of a row of variance v, with a factor a and a constant e."""

    mistake: str
    divisor: Callable[[Column, float, float], Column]  # q of v, a, e
    constant: Callable[[float, float, float], float]  # e of q, v, a, in a row of hardly any variance


LEAST_VARIANCE = _Deviation(
    "eps is the least variance, not added to it",
    lambda v, a, e: torch.sqrt((a * v).clamp(min=e)),
    lambda q, v, a: q * q,
)
LEAST_DEVIATION = LEAST_VARIANCE._replace(mistake="eps is the least deviation, not added to the variance")
_DEVIATIONS = [
    _Deviation("", lambda v, a, e: torch.sqrt(a * v + e), lambda q, v, a: q * q - a * v),
    _Deviation(
        "eps is added to the deviation, not to the variance",
        lambda v, a, e: torch.sqrt(a * v) + e,
        lambda q, v, a: q - (a * v) ** 0.5,
    ),
    LEAST_VARIANCE,
]


def _wrong_factor(factor: float) -> list[str]:
    for mistake, wrong in {
        "": 1.0,
        "variance divides by n - 1": WIDTH / (WIDTH - 1),
        "variance divides by n + 1": WIDTH / (WIDTH + 1),
        "variance is the sum of squares, not their mean": float(WIDTH),
    }.items():
        if abs(factor / wrong - 1) < NAMED_LIMIT:
            return [mistake] if mistake else []
    return [f"variance is {factor:.4g} times what it should be"]


def _wrong_eps(eps: float, deviation: _Deviation) -> list[str]:
    if eps < 1e-15:
        return ["eps is left out"]
    found = [deviation.mistake] if deviation.mistake else []
    return found if abs(eps / EPS - 1) < 0.05 else [*found, f"eps looks like {eps:.2g}, not {EPS:g}"]


# Precision. LayerNorm does not change if a row is shifted or stretched (arXiv 1607.06450, section 5.1). Only the
# rounding changes, which shows in how many bits a norm computes, whatever else it does.


def narrow_statistics(probe: Probe) -> list[str]:
    """Look for statistics of float32 rows in fewer bits than float32 has."""
    doubled = _off_by_doubling(probe)
    if doubled >= FLOAT16 / 8:
        return []
    shifted, stretched = shift_rounding(probe, 64.0, torch.float32, of_mean=True), _stretch_rounding(probe)
    off = max(shifted, stretched)
    if off >= FLOAT16 / 8 and _overflows(probe):
        return ["statistics are kept in float16"]
    if shifted < FLOAT16 / 8:  # few bits would tell in the mean too
        is_approximate = stretched > max(APPROXIMATE, 8 * doubled)
        return [f"the deviation is approximate, off by some {stretched:.0e} of it"] * is_approximate
    narrow = "bfloat16" if off > 2.8 * FLOAT16 else "11 bits, as TF32 has"
    return [f"statistics are kept in {narrow}"] if off < 8 * BFLOAT16 else []


def narrow_half_statistics(probe: Probe, dtype: torch.dtype) -> list[str]:
    """Look for statistics of float16 or bfloat16 rows in that dtype."""
    if _off_by_doubling(probe) >= FLOAT16 / 8:
        return []
    is_narrow = shift_rounding(probe, 64.0, dtype, of_mean=True) >= PRECISIONS[dtype].result / 8
    return [kept_in(dtype)] if is_narrow else []


def kept_in(dtype: torch.dtype) -> str:
    """Return the diagnosis of statistics in the dtype of the input."""
    return f"statistics are kept in {dtype_name(dtype)} for {dtype_name(dtype)} input"


def cancelling_variance(probe: Probe) -> list[str]:
    """Look for rounding that grows as the square of the shift. With two passes or Welford it grows linearly."""
    near, far = (shift_rounding(probe, shift, torch.float32) / 2**-24 for shift in (64.0, 1024.0))
    if far > 100 and 5 * near < far < 60 * near:
        return ["variance is a difference of squares, E[x^2] - E[x]^2, which cancels where the mean is large"]
    return []


def shift_rounding(probe: Probe, shift: float, dtype: torch.dtype, *, of_mean: bool = False) -> float:
    """Return how much a shift of the row, itself exact at ``dtype``, changes the result, relative to the shift.

    With ``of_mean``, ignore changes of scale of a whole row.
    """
    if dtype == torch.float32:
        spacing, steps = 2**-10, 2**10  # a deviation of 1, in steps that float32 still holds beside the shift
    else:
        spacing, steps = shift * torch.finfo(dtype).eps, 2  # the finest steps that this dtype holds beside the shift
    x = spacing * (steps * probe.normal(ROWS, LONG_WIDTH)).round()
    plain, shifted = probe(x, dtype=dtype), probe(x + shift, dtype=dtype)
    off = distance(rescaled(shifted, plain) if of_mean else shifted, plain)
    return off * x.std(-1, correction=0).mean().item() / shift / ONE_ROUNDING


def _off_by_doubling(probe: Probe) -> float:
    """Return how much doubling a row changes the result. Doubling is exact in binary, so only other mistakes show."""
    x = 10 * probe.standard_rows(ROWS, LONG_WIDTH)
    return distance(probe(2 * x, dtype=torch.float32), probe(x, dtype=torch.float32))


def _stretch_rounding(probe: Probe) -> float:
    x = 10 * probe.standard_rows(1, LONG_WIDTH).expand(ROWS, LONG_WIDTH)
    stretched = x * torch.linspace(1, 2, ROWS, dtype=torch.float64)[:, None]
    return distance(probe(stretched, dtype=torch.float32), probe(x, dtype=torch.float32)) / ONE_ROUNDING


def _overflows(probe: Probe) -> bool:
    """Return True if the result is wrong for numbers that only float16 cannot hold."""
    x = probe.standard_rows(ROWS, LONG_WIDTH)
    return distance(probe(1e5 * x + 1e6, dtype=torch.float32), probe(x, dtype=torch.float32)) > 0.5
