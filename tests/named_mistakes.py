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


DIMENSION = "statistics over {} in place of the width"
NEITHER = "(neither a LayerNorm nor an RMSNorm)"
FORWARDS: dict[str, Forward] = {
    DIMENSION.format("the sequence"): over(lambda x: -2),
    DIMENSION.format("the batch"): over(lambda x: 0),
    DIMENSION.format("batch and sequence"): over(lambda x: tuple(range(x.ndim - 1))),
    DIMENSION.format("sequence and width together"): over(lambda x: (-2, -1)),
    DIMENSION.format("the whole input"): over(lambda x: None),
    "no mean subtracted (an RMSNorm)": of_row(lambda x, eps: F.rms_norm(x, x.shape[-1:], eps=eps)),
    f"the mean subtracted in the variance and not from the row {NEITHER}": of_row(
        lambda x, eps: x / torch.sqrt(variance(x) + eps)
    ),
    f"the mean subtracted from the row and not in the variance {NEITHER}": of_row(
        lambda x, eps: (x - mean(x)) / torch.sqrt(mean(x * x) + eps)
    ),
    "the mean subtracted twice": of_row(lambda x, eps: F.rms_norm(x - 2 * mean(x), x.shape[-1:], eps=eps)),
    "the variance divided by n - 1": of_row(lambda x, eps: (x - mean(x)) / torch.sqrt(x.var(-1, keepdim=True) + eps)),
    "the mean absolute deviation in place of the standard deviation": of_row(
        lambda x, eps: (x - mean(x)) / torch.sqrt(absolute_deviation(x) ** 2 + eps)
    ),
    "the mean absolute deviation times sqrt(pi / 2) in place of the standard deviation": of_row(
        lambda x, eps: (x - mean(x)) / torch.sqrt((math.sqrt(math.pi / 2) * absolute_deviation(x)) ** 2 + eps)
    ),
    "std + eps in place of sqrt(variance + eps)": divided(lambda var, eps: var.sqrt() + eps),
    "the sum of squares in place of their mean": of_row(
        lambda x, eps: (x - mean(x)) / torch.sqrt((x - mean(x)).square().sum(-1, keepdim=True) + eps)
    ),
    "no division by the deviation": of_row(lambda x, eps: x - mean(x)),
    "sqrt(std + eps) in place of sqrt(variance + eps)": divided(lambda var, eps: (var**0.5 + eps) ** 0.5),
    "(variance + eps)^2 in place of sqrt(variance + eps)": divided(lambda var, eps: (var + eps) ** 2),
    "eps as a floor of the variance, max(var, eps), and not added": divided(lambda var, eps: var.clamp(min=eps).sqrt()),
    "eps as a floor of the deviation, max(std, eps), and not added": divided(
        lambda var, eps: var.sqrt().clamp(min=eps)
    ),
    "eps added twice, to the variance and to the deviation": divided(lambda var, eps: (var + eps).sqrt() + eps),
    "the variance in place of the deviation: a square root is missing": divided(lambda var, eps: var + eps),
    "no eps": with_eps(0.0),
    "eps 0.001 in place of 1e-05": with_eps(1e-3),
    "eps 0.0001 in place of 1e-05": with_eps(1e-4),
    "eps 5e-06 in place of 1e-05": with_eps(5e-6),
    "eps 1e-06 in place of 1e-05": with_eps(1e-6),
    "eps 1e-07 in place of 1e-05": with_eps(1e-7),
    "eps 1e-08 in place of 1e-05": with_eps(1e-8),
    "eps 1e-12 in place of 1e-05": with_eps(1e-12),
    "no shift": scaled(lambda row, scale, shift: row * scale),
    "no scale": scaled(lambda row, scale, shift: row + shift),
    "no scale and no shift": scaled(lambda row, scale, shift: row),
    "scale and shift exchanged": scaled(lambda row, scale, shift: row * shift + scale),
    "the scale as 1 + weight": scaled(lambda row, scale, shift: row + row * scale + shift),
    "the scale as weight, not 1 + weight": scaled(lambda row, scale, shift: row * scale - row + shift),
    "the shift added before the scale multiplies": scaled(lambda row, scale, shift: scale * (row + shift)),
    "the scale rounded to bfloat16": scaled(lambda row, scale, shift: row * scale.bfloat16().to(scale) + shift),
    "the scale rounded to float16": scaled(lambda row, scale, shift: row * scale.half().to(scale) + shift),
    "the scale read one column too late": scaled(lambda row, scale, shift: row * scale.roll(-1) + shift),
    "the scale read one column too early": scaled(lambda row, scale, shift: row * scale.roll(1) + shift),
    "the shift read one column too late": scaled(lambda row, scale, shift: row * scale + shift.roll(-1)),
    "the shift read one column too early": scaled(lambda row, scale, shift: row * scale + shift.roll(1)),
}
RMS_FORWARDS: dict[str, Forward] = {
    "the mean subtracted (a LayerNorm)": of_row(lambda x, eps: F.layer_norm(x, x.shape[-1:], eps=eps)),
    f"the deviation about the mean, which is not subtracted, in place of the RMS {NEITHER}": of_row(
        lambda x, eps: x / torch.sqrt(variance(x) + eps)
    ),
    f"the mean subtracted from the row and not in the mean square {NEITHER}": of_row(
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
