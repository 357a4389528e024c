"""Mistakes of formula, told from inputs and outputs alone: of dimension, scale, shift, mean, deviation and eps."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.conformance.probe import NAMED_LIMIT, Probe, alike, distance, slope, standardized
from minigpt.conformance.subject import EPS

MISPLACED = "normalizes over the wrong dimension"
BATCH = "a row depends on its batch"

WIDTH = 16
FIT_LIMIT = 1e-4  # to believe a fit over 18 orders of magnitude; float32 arithmetic leaves 1e-6
Column = Float[Tensor, " rows"]

# Dimensions of (batch, sequence, width) that a norm may have taken instead of the last
WRONG_DIMENSIONS = {
    (1,): "the sequence",
    (0,): "the batch",
    (0, 1): "batch and sequence",
    (1, 2): "sequence and width together",
    (0, 2): "batch and width together",
    (0, 1, 2): "the whole input",
}


def no_number(probe: Probe) -> list[str]:
    """Whether it returns NaN or an infinity where nothing is remarkable about the input."""
    y = probe(probe.normal(8, WIDTH))
    if y.isfinite().all():
        return []
    return [f"it returns {'NaN' if y.isnan().any() else 'infinities'} for ordinary rows"]


def other_without_gradients(probe: Probe) -> list[str]:
    """Whether it computes something else where no gradients are kept, as in every other probe."""
    x = probe.normal(8, WIDTH)
    if alike(probe(x), probe(x, gradients=True), FIT_LIMIT):
        return []
    return ["it gives other values without gradients than with them"]


def other_in_company(probe: Probe) -> list[str]:
    """Whether a row comes out otherwise among others, by more than rounding: one alone has a formula then, if any."""
    x = probe.normal(8, WIDTH)
    return [] if alike(probe(x), torch.cat([probe(row) for row in x.split(1)])) else [BATCH]


def wrong_dimension(probe: Probe) -> list[str]:
    """Whether it normalizes over other dimensions than the last, with 3-D or with 2-D input, or over parts of that."""
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
    """Whether that is ``x`` standardized over these dimensions, be the deviation by n or by n - 1."""
    expected, n = standardized(x, dims), math.prod(x.shape[dim] for dim in dims)
    return any(alike(y * factor, expected, 1e-2) for factor in (1.0, math.sqrt(n / (n - 1))))


def wrong_affine(probe: Probe) -> list[str]:
    """What became of scale and shift. Afterwards ``probe.plain`` gives the standardized row itself."""
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
    """Whether mean and deviation of the row are there at all."""
    if _is_elementwise(probe):
        return ["each value is computed by itself: neither the mean nor the deviation of its row enters"]
    return _wrong_mean(probe) + (_wrong_scaling(probe) or _other_deviation(probe))


def wrong_deviation(probe: Probe) -> list[str]:
    """What rows of variance v are divided by, from 1e-12 to 1e6: a factor for large v, a constant for small, a form."""
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
    """Whether another eps changes nothing, in rows that eps decides."""
    if not probe.subject.takes_eps:
        return []
    x = EPS / 10 * probe.standard_rows(8, WIDTH)  # below any eps, of the variance or of the deviation
    y = probe(x)  # nothing can be told from zeros, to which such rows may be rounded
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
    """A guess at what a row of variance v is divided by, q(v), from one factor a and one constant e."""

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
