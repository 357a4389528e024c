"""The formulas that the kit can name: tables of the parts of a norm and of its gradients, and other ones for each.

In each table of parts the key "" is the norm's own choice. Where LayerNorm and RMSNorm choose otherwise there is a
table for each, by whether it centers: True for LayerNorm.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minigpt.conformance.subject import GPT2_EPS

WRONG = "normalizes over the wrong dimension: over {} of a (batch, sequence, width) input"
DIMENSIONS = {  # by the rank of the input: the rows of a 2-D one are batch and sequence in one
    "": {3: (-1,), 2: (-1,)},
    WRONG.format("the sequence"): {3: (1,), 2: (0,)},
    WRONG.format("the batch"): {3: (0,), 2: (0,)},
    WRONG.format("batch and sequence"): {3: (0, 1), 2: (0,)},
    WRONG.format("sequence and width together"): {3: (1, 2), 2: (0, 1)},
    WRONG.format("the whole input"): {3: (0, 1, 2), 2: (0, 1)},
}
IS_NEITHER = "(it is neither a LayerNorm nor an RMSNorm)"
MEANS = {  # how often the mean is subtracted from the row, and from the values whose squares are the variance
    True: {
        "": (1, 1),
        "the mean is not subtracted (it is an RMSNorm)": (0, 0),
        f"the mean is subtracted in the variance and not from the row {IS_NEITHER}": (0, 1),
        f"the mean is subtracted from the row and not in the variance {IS_NEITHER}": (1, 0),
        "the mean is subtracted twice": (2, 2),
    },
    False: {
        "": (0, 0),
        "it subtracts the mean (it is a LayerNorm)": (1, 1),
        f"it divides by the deviation about the mean, which it does not subtract {IS_NEITHER}": (0, 1),
        f"it subtracts the mean from the row and not in the mean square {IS_NEITHER}": (1, 0),
    },
}
SPREADS: dict[str, Callable[[Tensor, tuple[int, ...], int], Tensor]] = {  # of n centred values
    "": lambda centred, dims, n: centred.square().sum(dims, keepdim=True) / n,
    "variance divides by n - 1": lambda centred, dims, n: centred.square().sum(dims, keepdim=True) / (n - 1),
    "it divides by the mean absolute deviation": lambda centred, dims, n: centred.abs().mean(dims, keepdim=True) ** 2,
    "it divides by the mean absolute deviation times sqrt(pi / 2)": (
        lambda centred, dims, n: math.pi / 2 * centred.abs().mean(dims, keepdim=True) ** 2
    ),
}
DIVISORS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "": lambda variance, eps: torch.sqrt(variance + eps),
    "eps is added to the deviation, not to the variance": lambda variance, eps: torch.sqrt(variance) + eps,
    "eps is a floor of the variance, max(var, eps), and not added": lambda v, eps: v.clamp(min=eps).sqrt(),
    "eps is a floor of the deviation, max(std, eps), and not added": lambda v, eps: v.sqrt().clamp(min=eps),
    "eps is added twice, to the variance and to the deviation": lambda v, eps: torch.sqrt(v + eps) + eps,
    "it divides by the variance: a square root is missing": lambda variance, eps: variance + eps,
}
EPS_CHOICES = {"": GPT2_EPS, "eps is left out": 0.0}
EPS_CHOICES |= {f"eps looks like {eps:g}, not {GPT2_EPS:g}": eps for eps in (1e-3, 1e-4, 5e-6, 1e-6, 1e-7, 1e-8, 1e-12)}
AFFINES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "": lambda y, scale, shift: y * scale + shift,
    "the shift is ignored": lambda y, scale, shift: y * scale,
    "the scale is ignored": lambda y, scale, shift: y + shift,
    "scale and shift are ignored": lambda y, scale, shift: y,
    "scale and shift are exchanged": lambda y, scale, shift: y * shift + scale,
    "it multiplies by 1 + scale": lambda y, scale, shift: y * (1 + scale) + shift,
    "the shift is added before the scale multiplies": lambda y, scale, shift: (y + shift) * scale,
    "the scale is read one column too late": lambda y, scale, shift: y * scale.roll(-1) + shift,
    "the scale is read one column too early": lambda y, scale, shift: y * scale.roll(1) + shift,
    "the shift is read one column too late": lambda y, scale, shift: y * scale + shift.roll(-1),
    "the shift is read one column too early": lambda y, scale, shift: y * scale + shift.roll(1),
}
TABLES: dict[bool, list[Mapping[str, Any]]] = {
    centers: [DIMENSIONS, means, SPREADS, DIVISORS, EPS_CHOICES, AFFINES] for centers, means in MEANS.items()
}

# The gradient of the input is (g - first * mean(g) - second * s * mean(g * s)) / deviation, with g = dy * weight
INCOMING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "": lambda dy, weight: dy * weight,
    "the scale is forgotten": lambda dy, weight: dy,
    "the scale is multiplied twice": lambda dy, weight: dy * weight * weight,
}
TERMS = {
    True: {
        "": (1.0, 1.0),
        "the statistics are detached: neither mean nor variance passes a gradient": (0.0, 0.0),
        "the mean passes no gradient: mean(g) is not subtracted": (0.0, 1.0),
        "the mean is subtracted twice": (2.0, 1.0),
        "the second term, s * mean(g * s), is missing: the variance passes no gradient": (1.0, 0.0),
        "the second term has the wrong sign": (1.0, -1.0),
        "the second term is subtracted twice": (1.0, 2.0),
    },
    False: {
        "": (0.0, 1.0),
        "mean(g) is subtracted, as in a LayerNorm": (1.0, 1.0),
        "the mean square is detached: it passes no gradient": (0.0, 0.0),
        "the second term has the wrong sign": (0.0, -1.0),
        "the second term is subtracted twice": (0.0, 2.0),
    },
}
FEWER_THAN_N = {  # how many fewer than n each of the two means is over
    "": (0, 0),
    "means are over n - 1": (1, 1),
    "the second term, s * mean(g * s), is over n - 1": (0, 1),
    "the first term, mean(g), is over n - 1": (1, 0),
}
DIVISIONS: dict[str, Callable[[Tensor], Tensor | float]] = {
    "": lambda deviation: deviation,
    "it is not divided by the deviation": lambda deviation: 1.0,
    "it is divided by the variance": lambda deviation: deviation**2,
    "eps is left out": lambda deviation: (deviation**2 - GPT2_EPS).sqrt(),
}
BACKWARD: dict[bool, list[Mapping[str, Any]]] = {
    centers: [INCOMING, terms, FEWER_THAN_N, DIVISIONS] for centers, terms in TERMS.items()
}
SUMS: dict[str, dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]]] = {  # of dy, x, its norm, the weight
    "weight": {
        "": lambda dy, x, s, weight: dy * s,
        "the row is not normalized": lambda dy, x, s, weight: dy * x,
        "the row is not divided by its deviation": lambda dy, x, s, weight: dy * (x - x.mean(-1, keepdim=True)),
        "the scale is multiplied in": lambda dy, x, s, weight: dy * weight * s,
    },
    "bias": {"": lambda dy, x, s, weight: dy, "the scale is multiplied in": lambda dy, x, s, weight: dy * weight},
}


def formula(x: Tensor, scale: Tensor, shift: Tensor, parts: Sequence[Any]) -> Tensor:
    """Return a norm of ``x``, (B, T, C) or (rows, C), made of one part of each of ``TABLES``, in float64."""
    by_rank, (of_row, of_variance), spread, divisor, eps, affine = parts
    dims = by_rank[x.ndim]
    mean = x.mean(dims, keepdim=True)
    n = math.prod(x.shape[dim] for dim in dims)
    variance = spread(x - of_variance * mean, dims, n)
    row = (x - of_row * mean) / divisor(variance, eps)
    return affine(row, scale, shift)


def true_norm(x: Tensor, centers: bool) -> Tensor:
    """Return LayerNorm of float64 rows, or RMSNorm, with scale 1 and shift 0."""
    return formula(x, torch.ones(()), torch.zeros(()), [table[""] for table in TABLES[centers]])


def deviation_of(x: Tensor, centers: bool) -> Tensor:
    """Return what the rows (rows, 1) of a LayerNorm, or of an RMSNorm, are divided by, in float64."""
    mean_square = x.var(-1, correction=0, keepdim=True) if centers else x.square().mean(-1, keepdim=True)
    return torch.sqrt(mean_square + GPT2_EPS)


def slope(parts: Sequence[Any], x: Tensor, dy: Tensor, weight: Tensor, centers: bool) -> Tensor:
    """Return a gradient of the input (rows, width) of these parts of ``BACKWARD``, times the deviation.

    So all rows count alike.
    """
    incoming, (first, second), (fewer, fewer_second), division = parts
    deviation, n, g, s = deviation_of(x, centers), x.shape[-1], incoming(dy, weight), true_norm(x, centers)
    along = s * (g * s).sum(-1, keepdim=True) / (n - fewer_second)
    return (g - first * g.sum(-1, keepdim=True) / (n - fewer) - second * along) / division(deviation) * deviation
