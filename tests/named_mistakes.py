"""LayerNorms and backward passes written out with one mistake each, by the name that the kit has for it.

None of them uses the kit's formulas. A second table has the mistakes that only an RMSNorm can have.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from kit import Forward
from sabotages import affine, wide
from torch import Tensor

from minigpt.norms import LayerNorm

Change = Callable[[dict[str, Any]], dict[str, Any]]


def mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def variance(x: Tensor) -> Tensor:
    return x.var(-1, correction=0, keepdim=True)


def over(dims: Callable[[Tensor], Any]) -> Forward:
    """The statistics are of the dimensions that ``dims`` takes from the input."""

    def forward(norm: LayerNorm, x: Tensor) -> Tensor:
        var, center = torch.var_mean(wide(x), dims(x), correction=0, keepdim=True)
        return affine(norm, (wide(x) - center) / torch.sqrt(var + norm.eps)).to(x.dtype)

    return forward


def of_row(standardize: Callable[[Tensor, float], Tensor]) -> Forward:
    """The row is standardized by a function of the row and eps."""
    return lambda norm, x: affine(norm, standardize(wide(x), norm.eps)).to(x.dtype)


def divided(divisor: Callable[[Tensor, float], Tensor]) -> Forward:
    """The centred row is divided by a function of the variance and eps."""
    return of_row(lambda x, eps: (x - mean(x)) / divisor(variance(x), eps))


def with_eps(eps: float) -> Forward:
    return of_row(lambda x, _: F.layer_norm(x, x.shape[-1:], eps=eps))


def scaled(combine: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Forward:
    """The standardized row, scale and shift are combined by a function of the three."""

    def forward(norm: LayerNorm, x: Tensor) -> Tensor:
        row = F.layer_norm(wide(x), x.shape[-1:], eps=norm.eps)
        shift = torch.zeros_like(norm.weight) if norm.bias is None else norm.bias
        return combine(row, norm.weight, shift).to(x.dtype)

    return forward


def absolute_deviation(x: Tensor) -> Tensor:
    return mean((x - mean(x)).abs())


DIMENSION = "normalizes over the wrong dimension: over {} of a (batch, sequence, width) input"
NEITHER = "(it is neither a LayerNorm nor an RMSNorm)"
FORWARDS: dict[str, Forward] = {
    DIMENSION.format("the sequence"): over(lambda x: -2),
    DIMENSION.format("the batch"): over(lambda x: 0),
    DIMENSION.format("batch and sequence"): over(lambda x: tuple(range(x.ndim - 1))),
    DIMENSION.format("sequence and width together"): over(lambda x: (-2, -1)),
    DIMENSION.format("the whole input"): over(lambda x: None),
    "the mean is not subtracted (it is an RMSNorm)": of_row(lambda x, eps: F.rms_norm(x, x.shape[-1:], eps=eps)),
    f"the mean is subtracted in the variance and not from the row {NEITHER}": of_row(
        lambda x, eps: x / torch.sqrt(variance(x) + eps)
    ),
    f"the mean is subtracted from the row and not in the variance {NEITHER}": of_row(
        lambda x, eps: (x - mean(x)) / torch.sqrt(mean(x * x) + eps)
    ),
    "the mean is subtracted twice": of_row(lambda x, eps: F.rms_norm(x - 2 * mean(x), x.shape[-1:], eps=eps)),
    "variance divides by n - 1": of_row(lambda x, eps: (x - mean(x)) / torch.sqrt(x.var(-1, keepdim=True) + eps)),
    "it divides by the mean absolute deviation": of_row(
        lambda x, eps: (x - mean(x)) / torch.sqrt(absolute_deviation(x) ** 2 + eps)
    ),
    "it divides by the mean absolute deviation times sqrt(pi / 2)": of_row(
        lambda x, eps: (x - mean(x)) / torch.sqrt((math.sqrt(math.pi / 2) * absolute_deviation(x)) ** 2 + eps)
    ),
    "eps is added to the deviation, not to the variance": divided(lambda var, eps: var.sqrt() + eps),
    "eps is a floor of the variance, max(var, eps), and not added": divided(lambda var, eps: var.clamp(min=eps).sqrt()),
    "eps is a floor of the deviation, max(std, eps), and not added": divided(
        lambda var, eps: var.sqrt().clamp(min=eps)
    ),
    "eps is added twice, to the variance and to the deviation": divided(lambda var, eps: (var + eps).sqrt() + eps),
    "it divides by the variance: a square root is missing": divided(lambda var, eps: var + eps),
    "eps is left out": with_eps(0.0),
    "eps looks like 0.001, not 1e-05": with_eps(1e-3),
    "eps looks like 0.0001, not 1e-05": with_eps(1e-4),
    "eps looks like 5e-06, not 1e-05": with_eps(5e-6),
    "eps looks like 1e-06, not 1e-05": with_eps(1e-6),
    "eps looks like 1e-07, not 1e-05": with_eps(1e-7),
    "eps looks like 1e-08, not 1e-05": with_eps(1e-8),
    "eps looks like 1e-12, not 1e-05": with_eps(1e-12),
    "the shift is ignored": scaled(lambda row, scale, shift: row * scale),
    "the scale is ignored": scaled(lambda row, scale, shift: row + shift),
    "scale and shift are ignored": scaled(lambda row, scale, shift: row),
    "scale and shift are exchanged": scaled(lambda row, scale, shift: row * shift + scale),
    "it multiplies by 1 + scale": scaled(lambda row, scale, shift: row + row * scale + shift),
    "the shift is added before the scale multiplies": scaled(lambda row, scale, shift: scale * (row + shift)),
    "the scale is read one column too late": scaled(lambda row, scale, shift: row * scale.roll(-1) + shift),
    "the scale is read one column too early": scaled(lambda row, scale, shift: row * scale.roll(1) + shift),
    "the shift is read one column too late": scaled(lambda row, scale, shift: row * scale + shift.roll(-1)),
    "the shift is read one column too early": scaled(lambda row, scale, shift: row * scale + shift.roll(1)),
}
RMS_FORWARDS: dict[str, Forward] = {
    "it subtracts the mean (it is a LayerNorm)": of_row(lambda x, eps: F.layer_norm(x, x.shape[-1:], eps=eps)),
    f"it divides by the deviation about the mean, which it does not subtract {NEITHER}": of_row(
        lambda x, eps: x / torch.sqrt(variance(x) + eps)
    ),
    f"it subtracts the mean from the row and not in the mean square {NEITHER}": of_row(
        lambda x, eps: (x - mean(x)) / torch.sqrt(mean(x * x) + eps)
    ),
}

# Changes of the parts of ``sabotages.Backward``
INPUT_GRADIENTS: dict[str, Change] = {
    "the scale is forgotten": lambda p: {"g": p["dy"]},
    "the scale is multiplied twice": lambda p: {"g": p["g"] * p["w"]},
    "the statistics are detached: neither mean nor variance passes a gradient": lambda p: {"first": 0.0, "second": 0.0},
    "the mean passes no gradient: mean(g) is not subtracted": lambda p: {"first": 0.0},
    "the mean is subtracted twice": lambda p: {"first": 2.0},
    "the second term, s * mean(g * s), is missing: the variance passes no gradient": lambda p: {"second": 0.0},
    "the second term has the wrong sign": lambda p: {"second": -1.0},
    "the second term is subtracted twice": lambda p: {"second": 2.0},
    "means are over n - 1": lambda p: {"n": p["n"] - 1},
    "the second term, s * mean(g * s), is over n - 1": lambda p: {"second": p["n"] / (p["n"] - 1)},
    "the first term, mean(g), is over n - 1": lambda p: {"first": p["n"] / (p["n"] - 1)},
    "it is not divided by the deviation": lambda p: {"r": torch.ones_like(p["r"])},
    "it is divided by the variance": lambda p: {"r": p["r"] ** 2},
    "eps is left out": lambda p: {"r": torch.rsqrt(variance(wide(p["x"])))},
}
RMS_INPUT_GRADIENTS: dict[str, Change] = {
    "mean(g) is subtracted, as in a LayerNorm": lambda p: {"first": 1.0},
    "the mean square is detached: it passes no gradient": lambda p: {"second": 0.0},
}
WEIGHT_GRADIENTS: dict[str, Change] = {
    "the row is not normalized": lambda p: {"terms": p["dy"] * p["x"]},
    "the row is not divided by its deviation": lambda p: {"terms": p["dy"] * (p["x"] - mean(wide(p["x"])))},
    "the scale is multiplied in": lambda p: {"terms": p["g"] * p["s"]},
}
BIAS_GRADIENTS: dict[str, Change] = {
    "the scale is multiplied in": lambda p: {"sum_bias": lambda terms: (terms * p["w"]).sum(0)},
}
