"""The backward passes that the kit can name: tables of the parts of a norm's gradients.

In each table of parts the key "" is the right part. Where LayerNorm and RMSNorm differ there is a table for each kind.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from minigpt.norms.formulas import GPT2_EPS, deviation, exact_norm

# The gradient of the input is (g - first * mean(g) - second * s * mean(g * s)) / deviation, with g = dy * weight
INCOMING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "": lambda dy, weight: dy * weight,
    "the scale is forgotten": lambda dy, weight: dy,
    "the scale is multiplied twice": lambda dy, weight: dy * weight * weight,
}
TERMS = {
    "layer_norm": {
        "": (1.0, 1.0),
        "the statistics are detached: neither mean nor variance passes a gradient": (0.0, 0.0),
        "the mean passes no gradient: mean(g) is not subtracted": (0.0, 1.0),
        "the mean is subtracted twice": (2.0, 1.0),
        "the second term, s * mean(g * s), is missing: the variance passes no gradient": (1.0, 0.0),
        "the second term has the wrong sign": (1.0, -1.0),
        "the second term is subtracted twice": (1.0, 2.0),
    },
    "rms_norm": {
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
BACKWARD: dict[str, list[Mapping[str, Any]]] = {
    kind: [INCOMING, terms, FEWER_THAN_N, DIVISIONS] for kind, terms in TERMS.items()
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


def slope(parts: Sequence[Any], x: Tensor, dy: Tensor, weight: Tensor, kind: str) -> Tensor:
    """Return a gradient of the input (rows, width) of these parts of ``BACKWARD``, times the deviation.

    So all rows count alike.
    """
    incoming, (first, second), (fewer, fewer_second), division = parts
    divisor, n, g, s = deviation(x, kind), x.shape[-1], incoming(dy, weight), exact_norm(x, kind)
    along = s * (g * s).sum(-1, keepdim=True) / (n - fewer_second)
    return (g - first * g.sum(-1, keepdim=True) / (n - fewer) - second * along) / division(divisor) * divisor
