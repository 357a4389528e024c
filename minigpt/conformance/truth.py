"""LayerNorm in float64, and a bound on the rounding of a correct norm."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

# u, the unit roundoff, is the largest relative error of one rounding: half the distance from 1 to the next number


class Precision(NamedTuple):
    """The precision that a norm must have at one dtype of its input."""

    statistics: float  # u of the arithmetic inside a row
    result: float  # u of the output's dtype
    smallest: float  # a smaller result may be rounded to 0
    why: str


PRECISIONS = {
    torch.float64: Precision(2**-53, 2**-53, 2**-1022, "float64 throughout"),
    torch.float32: Precision(2**-24, 2**-24, 2**-126, "float32 throughout"),
    torch.float16: Precision(2**-24, 2**-11, 2**-24, "float32 statistics, since float16 ends at 65,504"),
    torch.bfloat16: Precision(2**-24, 2**-8, 2**-126, "float32 statistics, since bfloat16 has 8 bits"),
}


class Truth(NamedTuple):
    """LayerNorm, and the largest error of a correct norm, element by element; float64 on the CPU."""

    values: Float[Tensor, "*dims"]
    bound: Float[Tensor, "*dims"]


def bound_reason(dtype: torch.dtype) -> str:
    """Return the reason for ``Truth.bound`` in a few words."""
    half = PRECISIONS[dtype].result > PRECISIONS[dtype].statistics
    growth = "4 + n" if half else "4 + 2 sqrt(n)"
    return f"{PRECISIONS[dtype].why}: {growth} roundings times largest value / deviation, and 3 of the result"


def truth(
    x: Float[Tensor, "*rows width"], weight: Float[Tensor, " width"], bias: Float[Tensor, " width"] | None, eps: float
) -> Truth:
    """Return LayerNorm (arXiv 1607.06450, equations 3 and 4) of ``x``, and the bound for a correct norm.

    The numbers of ``x`` are taken as exact. The bound follows the conditioning: a row whose values reach ``K``
    deviations from 0 loses ``K u`` in ``x - mean`` with any algorithm. A difference of squares, E[x^2] - E[x]^2, loses
    ``K^2 u`` and exceeds it.
    """
    precision, weight = PRECISIONS[x.dtype], _widen(weight)
    shift = torch.zeros_like(weight) if bias is None else _widen(bias)
    standard, _, reach, growth = _standardized(x, eps)
    statistics = precision.statistics * (growth * reach * (1 + standard.abs()) + 8 * standard.abs())
    result = precision.result * (1 + 4 * precision.result) * (3 * (standard * weight).abs() + shift.abs())
    folded = 2 * precision.statistics * shift.abs()  # norms may add (bias - mean / deviation * weight) in one step
    bound = statistics * weight.abs() + result + folded + precision.smallest * (2 + weight.abs())
    return Truth(standard * weight + shift, bound)


def gradient_truth(
    x: Float[Tensor, "*rows width"], weight: Float[Tensor, " width"], eps: float, dy: Float[Tensor, "*rows width"]
) -> dict[str, Truth]:
    """Return the gradients of "input", "weight" and "bias" for an incoming ``dy``.

    With g = dy * weight and s the standardized row, the gradient of the input is
    (g - mean(g) - s mean(g s)) / deviation. An error of K u in s enters twice, so it is twice in the bound. The
    gradients of weight and bias are sums over the rows, and the errors of the terms add up.
    """
    precision, dy = PRECISIONS[x.dtype], _widen(dy)
    s, deviation, reach, growth = _standardized(x, eps)
    g, rows = dy * _widen(weight), tuple(range(x.ndim - 1))
    along = g.mean(-1, keepdim=True) + s * (g * s).mean(-1, keepdim=True)
    largest = g.abs().amax(-1, keepdim=True) / deviation  # (..., 1)
    statistics, size = precision.statistics * growth * (1 + reach), s.abs()
    summing = precision.result * sum_growth(x[..., 0].numel())  # in the dtype of the weights, as PyTorch's on a CPU
    off = {
        "input": largest * (statistics * (1 + size).square() + 3 * precision.result * (2 + size)),
        "weight": (dy.abs() * (statistics * (1 + size) + summing * size)).sum(rows),
        "bias": summing * dy.abs().sum(rows),
    }
    true = {"input": (g - along) / deviation, "weight": (dy * s).sum(rows), "bias": dy.sum(rows)}
    return {name: Truth(true[name], off[name] + precision.smallest) for name in true}


def sum_growth(terms: int, *, alike: bool = False) -> float:
    """Return the largest error, in u, of a sum of ``terms`` roundings. Random roundings grow as sqrt(n), not as n.

    Higham & Mary 2019, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41(5). The
    factor 2 lets a plain loop over the row pass; blocked and pairwise sums stay below 3 u at any width. With ``alike``,
    numbers repeat, as in a constant row, and so do their roundings; the error may then grow as n.
    """
    return 4.0 + (terms if alike else 2 * math.sqrt(terms))


def _standardized(x: Float[Tensor, "*rows width"], eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (x - mean) / deviation (..., C), and three (..., 1): the deviation, K, and the growth of a row's sums."""
    precision, x, terms = PRECISIONS[x.dtype], _widen(x), x.shape[-1]
    centred = x - x.mean(-1, keepdim=True)
    centred = centred - centred.mean(-1, keepdim=True)  # the second mean is the rounding error of the first
    deviation = torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)
    reach = x.abs().amax(-1, keepdim=True) / deviation
    alike = (centred == 0).all(-1, keepdim=True) | (precision.result > precision.statistics)
    growth = torch.where(alike, sum_growth(terms, alike=True), sum_growth(terms))
    return centred / deviation, deviation, reach, growth


def _widen(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().double()
