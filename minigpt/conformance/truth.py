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


def sum_growth(terms: int, *, alike: bool = False) -> float:
    """Return the largest error, in u, of a sum of ``terms`` roundings. Random roundings grow as sqrt(n), not as n.

    Higham & Mary 2019, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41(5). The
    factor 2 lets a plain loop over the row pass; blocked and pairwise sums stay below 3 u at any width. With ``alike``,
    numbers repeat, as in a constant row, and so do their roundings; the error may then grow as n.
    """
    return 4.0 + (terms if alike else 2 * math.sqrt(terms))


def layer_norm_float64(
    x: Float[Tensor, "*rows width"], weight: Float[Tensor, " width"], bias: Float[Tensor, " width"] | None, eps: float
) -> Float[Tensor, "*rows width"]:
    """Return LayerNorm (arXiv 1607.06450, equations 3 and 4) of float64 ``x``, exact to a few u for any mean."""
    centred, deviation = _moments(x, eps)
    y = centred / deviation * weight
    return y if bias is None else y + bias


def truth(
    x: Float[Tensor, "*rows width"], weight: Float[Tensor, " width"], bias: Float[Tensor, " width"] | None, eps: float
) -> Truth:
    """Return LayerNorm of ``x``, whose numbers are taken as exact, and the bound for a correct norm.

    The bound follows the conditioning: a row whose values reach ``K`` deviations from 0 loses ``K u`` in ``x - mean``
    with any algorithm. A difference of squares, E[x^2] - E[x]^2, loses ``K^2 u`` and exceeds it.
    """
    precision = PRECISIONS[x.dtype]
    x, weight = _widen(x), _widen(weight)
    shift = torch.zeros_like(weight) if bias is None else _widen(bias)
    centred, deviation = _moments(x, eps)
    standard = centred / deviation  # (..., C)
    reach = x.abs().amax(-1, keepdim=True) / deviation  # (..., 1): K
    growth = _growth(centred, precision)  # (..., 1)
    statistics = precision.statistics * (growth * reach * (1 + standard.abs()) + 8 * standard.abs())
    result = precision.result * (1 + 4 * precision.result) * (3 * (standard * weight).abs() + shift.abs())
    folded = 2 * precision.statistics * shift.abs()  # norms may add (bias - mean / deviation * weight) in one step
    bound = statistics * weight.abs() + result + folded + precision.smallest * (2 + weight.abs())
    return Truth(standard * weight + shift, bound)


def gradient_truth(
    x: Float[Tensor, "*rows width"],
    weight: Float[Tensor, " width"],
    bias: Float[Tensor, " width"] | None,
    eps: float,
    dy: Float[Tensor, "*rows width"],
) -> dict[str, Truth]:
    """Return the gradients of "input", "weight" and, if there is one, "bias" for an incoming ``dy``.

    Autograd computes them in float64. With g = dy * weight and s the standardized row, the gradient of the input is
    (g - mean(g) - s mean(g s)) / deviation. An error of K u in s enters twice, so it is twice in the bound. The
    gradients of weight and bias are sums over the rows, and the errors of the terms add up.
    """
    precision = PRECISIONS[x.dtype]
    leaves = {"input": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    leaves = {name: _widen(leaf).requires_grad_() for name, leaf in leaves.items()}
    wide, wide_dy = leaves["input"].detach(), _widen(dy)
    with torch.enable_grad():
        y = layer_norm_float64(leaves["input"], leaves["weight"], leaves.get("bias"), eps)
        true = torch.autograd.grad(y, list(leaves.values()), wide_dy)

    centred, deviation = _moments(wide, eps)
    standard = (centred / deviation).abs()  # (..., C)
    reach = wide.abs().amax(-1, keepdim=True) / deviation  # (..., 1)
    largest = (wide_dy * _widen(weight)).abs().amax(-1, keepdim=True)  # (..., 1)
    statistics = precision.statistics * _growth(centred, precision) * (1 + reach)  # (..., 1)
    rows = tuple(range(x.ndim - 1))
    summing = precision.result * sum_growth(x[..., 0].numel())  # in the dtype of the weights, as PyTorch's on a CPU
    off = {
        "input": largest / deviation * (statistics * (1 + standard).square() + 3 * precision.result * (2 + standard)),
        "weight": (wide_dy.abs() * (statistics * (1 + standard) + summing * standard)).sum(rows),
        "bias": summing * wide_dy.abs().sum(rows),
    }
    return {name: Truth(gradient, off[name] + precision.smallest) for name, gradient in zip(leaves, true, strict=True)}


def _moments(x: Float[Tensor, "*rows width"], eps: float) -> tuple[Float[Tensor, "*rows width"], Tensor]:
    """Return x - mean and sqrt(var + eps). Centre twice: the second mean is the rounding error of the first."""
    centred = x - x.mean(-1, keepdim=True)
    centred = centred - centred.mean(-1, keepdim=True)
    return centred, torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)  # (..., C), (..., 1)


def _growth(centred: Float[Tensor, "*rows width"], precision: Precision) -> Tensor:
    """Return ``sum_growth`` of each row, (..., 1)."""
    terms = centred.shape[-1]
    alike = (centred == 0).all(-1, keepdim=True) | (precision.result > precision.statistics)
    return torch.where(alike, sum_growth(terms, alike=True), sum_growth(terms))


def _widen(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().double()
