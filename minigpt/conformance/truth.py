"""The inputs of a conformance run, the norms of them in float64, and a bound on the rounding of a correct norm."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from minigpt.machine import one_thread

RowsInFloat64 = Float[Tensor, "rows width"]
Weights = tuple[Float[Tensor, " width"], Float[Tensor, " width"]]

PERIOD = 1021  # a prime: longer inputs repeat their first rows, whose truth is computed once
CONSTANTS = (0.0, 1.0, -2.5, 0.1, 10.0)
# Values whose squares overflow the input's dtype but not the statistics; values whose squares vanish next to eps
HUGE = {torch.float64: 1e100, torch.float32: 1e15, torch.bfloat16: 1e15, torch.float16: 6e4}
TINY = {torch.float64: 1e-160, torch.float32: 1e-20, torch.bfloat16: 1e-20, torch.float16: 1e-6}


def normal(generator: Generator, *shape: int) -> Tensor:
    """Return random numbers in float64. PyTorch draws them five times as fast in float32."""
    return torch.randn(*shape, generator=generator).double()


def ordinary(rows: int, width: int, generator: Generator) -> RowsInFloat64:
    """Return rows with deviations from 0.5 to 2 and means from -1 to 1. None is symmetric about 0."""
    scale = 0.5 + 1.5 * torch.rand(rows, 1, generator=generator, dtype=torch.float64)
    shift = 2 * torch.rand(rows, 1, generator=generator, dtype=torch.float64) - 1
    return normal(generator, rows, width) * scale + shift


def far_from_zero(rows: int, width: int, generator: Generator) -> RowsInFloat64:
    """Return rows with a mean a thousand times the deviation, alternately positive and negative."""
    number = torch.arange(rows, dtype=torch.float64)
    side = 1 - 2 * (number[:, None] % 2)
    x = normal(generator, rows, width)
    x[:, 0], x[:, 1] = 6, -6  # at 1000 bfloat16 has steps of 4, which must not make a row constant
    return x + 1000 * side


def off_zero(rows: int, width: int, generator: Generator) -> RowsInFloat64:
    """Return rows with means of 16 to 26 deviations: float32 holds such a mean well, and half precision does not."""
    mean = 16 + 10 * torch.rand(rows, 1, generator=generator, dtype=torch.float64)
    return normal(generator, rows, width) + mean


def near_eps(rows: int, width: int, generator: Generator) -> RowsInFloat64:
    """Return rows with deviations from a tenth to ten times sqrt(1e-5): here eps decides the result."""
    deviations = torch.logspace(-1, 1, rows, dtype=torch.float64)[:, None]
    return normal(generator, rows, width) * 1e-5**0.5 * deviations


def massive(rows: int, width: int, generator: Generator) -> RowsInFloat64:
    """Return rows like GPT-2's residual stream: values about 1, and two or three near 3,000 (arXiv 2402.17762)."""
    x = normal(generator, rows, width)
    x[:, width // 3] += 3000
    x[:, width // 2] -= 2400
    x[::2, -1] += 900
    return x


def constant(rows: int, width: int, generator: Generator) -> RowsInFloat64:
    """Return rows of one value each, whose norm is the bias."""
    values = torch.tensor(CONSTANTS, dtype=torch.float64)
    repeats = math.ceil(rows / len(values))
    column = values.repeat(repeats)[:rows, None]
    return column.expand(rows, width).clone()


def uniform(rows: int, width: int, generator: Generator) -> RowsInFloat64:
    """Return values between -1 and 1, which a magnitude multiplies."""
    return 2 * torch.rand(rows, width, generator=generator, dtype=torch.float64) - 1


def by_columns(x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
    """Return the same values, stored by columns."""
    return x.t().contiguous().t()


def ordinary_weights(width: int, generator: Generator) -> Weights:
    """Return a scale about 1 and a shift about 0.5 of either sign: scale 1 and shift 0 would hide mistakes."""
    return 1 + 0.7 * normal(generator, width), 0.5 + normal(generator, width)


def no_shift(width: int, generator: Generator) -> Weights:
    """Return a scale about 1 and a shift of 0, so that a small result is seen."""
    return 1 + 0.7 * normal(generator, width), torch.zeros(width, dtype=torch.float64)


def trained_weights(width: int, generator: Generator) -> Weights:
    """Return weights as in a trained GPT-2: most about 0.2, some almost 0, a few from 10 to 20."""
    few, fewer = max(width // 16, 1), max(width // 4, 1)
    weight = 0.2 + 0.05 * normal(generator, width)
    weight[::few] = 1e-4
    weight[1::fewer] = 10 + 10 * torch.rand(1, generator=generator, dtype=torch.float64)
    bias = 0.02 * normal(generator, width)
    bias[1::fewer] = -3.0
    return weight, bias


def pruned_weights(width: int, generator: Generator) -> Weights:
    """Return weights of which some are exactly 0, some tiny and some negative: no backward pass may divide by them."""
    weight, bias = ordinary_weights(width, generator)
    weight[::4], weight[1::4] = 0.0, -1e-6
    return weight, bias


class RowKind(NamedTuple):
    """One kind of row at every dtype, and the weights of the norm that gets it."""

    name: str
    tests: str
    make: Callable[[int, int, Generator], RowsInFloat64]
    weights: Callable[[int, Generator], Weights] = ordinary_weights
    magnitudes: Mapping[torch.dtype, float] | None = None  # multiply the rows, by dtype

    def rows(self, rows: int, width: int, generator: Generator, dtype: torch.dtype) -> RowsInFloat64:
        """Return at most ``PERIOD`` rows in float64 for a test at ``dtype``, not yet rounded to it."""
        x = self.make(min(rows, PERIOD), width, generator)
        if self.magnitudes is None:
            return x
        return x * self.magnitudes[dtype]


ORDINARY = RowKind("ordinary rows", "rows with different means and deviations", ordinary)
PRUNED = RowKind("zero scale", "weights that are exactly 0, tiny or negative", ordinary, pruned_weights)
CONSTANT = RowKind("constant rows", "rows of one value each", constant)
HUGE_VALUES = RowKind("huge values", "values whose squares overflow the dtype of the input", uniform, magnitudes=HUGE)
FAR_FROM_ZERO = RowKind("mean far from 0", "a mean a thousand times the deviation", far_from_zero)
OFF_ZERO = RowKind("mean off 0", "means of 16 to 26 deviations, which half precision rounds", off_zero)
MASSIVE = RowKind("massive activations", "a few values near 3,000 among values about 1", massive)
ROW_KINDS = [
    ORDINARY,
    RowKind("trained weights", "a few weights from 10 to 20, some almost 0", ordinary, trained_weights),
    PRUNED,
    MASSIVE,
    FAR_FROM_ZERO,
    RowKind("deviation near sqrt(eps)", "rows where eps decides the result", near_eps),
    CONSTANT,
    HUGE_VALUES,
    RowKind("tiny values", "values whose squares vanish next to eps, and no shift", uniform, no_shift, TINY),
]

# u, the unit roundoff, is the largest relative error of one rounding: half the distance from 1 to the next number


class Roundoff(NamedTuple):
    """The precision that a norm must have at one dtype of its input."""

    statistics: float  # u of the arithmetic inside a row
    result: float  # u of the output's dtype
    smallest: float  # a smaller result may be rounded to 0

    @property
    def is_half(self) -> bool:
        """True if a row is computed in a wider dtype, and its result is rounded once."""
        return self.result > self.statistics


PRECISIONS = {  # half precision needs float32 inside: float16 ends at 65,504, and bfloat16 has 8 bits
    torch.float64: Roundoff(2**-53, 2**-53, 2**-1022),
    torch.float32: Roundoff(2**-24, 2**-24, 2**-126),
    torch.float16: Roundoff(2**-24, 2**-11, 2**-24),
    torch.bfloat16: Roundoff(2**-24, 2**-8, 2**-126),
}


class TrueValues(NamedTuple):
    """A norm or a gradient of it, and the largest error of a correct one, by element; float64 on the CPU."""

    values: Float[Tensor, "*dims"]
    bound: Float[Tensor, "*dims"]


@one_thread()
def truth(
    x: Float[Tensor, "*rows width"],
    weight: Float[Tensor, " width"],
    bias: Float[Tensor, " width"] | None,
    eps: float,
    *,
    centers: bool = True,
    roundings: int | None = None,
) -> TrueValues:
    """Return LayerNorm (arXiv 1607.06450, equations 3 and 4) of ``x``, and the bound for a correct norm.

    The numbers of ``x`` are taken as exact. The bound follows the conditioning: a row whose values reach ``K``
    deviations from 0 loses ``K u`` in ``x - mean`` with any algorithm. A difference of squares, E[x^2] - E[x]^2, loses
    ``K^2 u`` and exceeds it. In half precision the result is rounded once, by at most half the distance of two numbers.

    Args:
        centers: subtract the mean of the row; False for an RMSNorm (arXiv 1910.07467).
        roundings: how often the scaled row is rounded to the dtype of ``x``: 1 in half precision by default, else 3.
    """
    precision, scale = PRECISIONS[x.dtype], _widen(weight)
    shift = torch.zeros_like(scale)
    if bias is not None:
        shift = _widen(bias)
    row = _standardized(x, eps, centers)
    size, scaled = row.values.abs(), row.values * scale
    of_row = row.growth * row.reach * (1 + size) + 8 * size
    error = precision.statistics * of_row * scale.abs()
    error += 2 * precision.statistics * shift.abs()  # norms may add (bias - mean / deviation * weight) in one step
    error += 3 * precision.statistics * scaled.abs()
    error += precision.smallest * (2 + scale.abs())
    if precision.is_half and roundings is None:
        rounding = _half_step(scaled + shift, error, precision.result)
    else:
        u = precision.result * (1 + 4 * precision.result)
        count = roundings or 3
        rounding = u * (count * scaled.abs() + shift.abs())
    return TrueValues(scaled + shift, error + rounding)


@one_thread()
def gradient_truth(
    x: Float[Tensor, "*rows width"],
    weight: Float[Tensor, " width"],
    eps: float,
    dy: Float[Tensor, "*rows width"],
    *,
    centers: bool = True,
    rows: int | None = None,
) -> dict[str, TrueValues]:
    """Return the gradients of "input", "weight" and "bias" for an incoming ``dy``.

    With g = dy * weight and s the standardized row, the gradient of the input is
    (g - mean(g) - s mean(g s)) / deviation; an RMSNorm has no mean(g). An error of K u in s enters twice, so it is
    twice in the bound. The gradients of weight and bias are sums over the rows in the precision of the statistics, and
    the errors add up. In half precision each term may be rounded by itself, as autograd does where a row is widened
    more than once.

    Args:
        centers: subtract the mean of the row; False for an RMSNorm.
        rows: how many rows the sums are over, where they repeat the rows of ``x`` and ``dy``.
    """
    precision, dy = PRECISIONS[x.dtype], _widen(dy)
    row = _standardized(x, eps, centers)
    s, g = row.values, dy * _widen(weight)
    count = x[..., 0].numel()
    total_rows = rows or count
    whole, rest = divmod(total_rows, count)
    times = whole + (torch.arange(count) < rest).int()  # how often each row is there
    times = times.view(*x.shape[:-1], 1)

    def total(terms: Tensor) -> Tensor:
        if total_rows > count:
            terms = times * terms
        return terms.sum(tuple(range(x.ndim - 1)))

    product = g * s
    along = s * product.mean(-1, keepdim=True)
    if centers:
        along = along + g.mean(-1, keepdim=True)
    true = {
        "input": (g - along) / row.deviation,
        "weight": total(dy * s),
        "bias": total(dy),
    }

    u, size = precision.statistics, s.abs()
    largest = g.abs().amax(-1, keepdim=True) / row.deviation  # (..., 1)
    statistics = u * row.growth * (1 + row.reach)
    summing = u * sum_growth(total_rows)
    of_input = statistics * (1 + size).square() + 3 * u * (2 + size)
    of_weight = statistics * (1 + size) + summing * size
    off = {
        "input": largest * of_input,
        "weight": total(dy.abs() * of_weight),
        "bias": summing * total(dy.abs()),
    }
    for name, bound in off.items():
        off[name] = bound + precision.smallest
    if precision.is_half:
        mean_size = g.abs().mean(-1, keepdim=True)
        mean_product = product.abs().mean(-1, keepdim=True)
        mean_sizes = mean_size + size * mean_product
        terms = {
            "input": (g.abs() + mean_sizes) / row.deviation,
            "weight": 2 * total(times * (dy * s).square()).sqrt(),  # roundings of repeated rows are the same
        }
        for name, bound in off.items():
            off[name] = bound + _half_step(true[name], bound, precision.result)
        for name, each in terms.items():
            off[name] = off[name] + 3 * precision.result * each
    return {name: TrueValues(true[name], bound) for name, bound in off.items()}


def sum_growth(terms: int, *, repeated: bool = False) -> float:
    """Return the largest error, in u, of a sum of ``terms`` roundings. Random roundings grow as sqrt(n), not as n.

    Higham & Mary 2019, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41(5). The
    factor 2 lets a plain loop over the row pass; blocked and pairwise sums stay below 3 u at any width. With
    ``repeated``, numbers repeat, as in a constant row, and so do their roundings; the error may then grow as n.
    """
    if repeated:
        return 4.0 + terms
    return 4.0 + 2 * math.sqrt(terms)


def _half_step(values: Tensor, error: Tensor, u: float) -> Tensor:
    """Return half the distance of the two numbers around a value that is off by ``error``, where u is the dtype's."""
    exponent = torch.frexp(values.abs() + error).exponent - 1
    return torch.ldexp(torch.full_like(values, u), exponent)


class Standardized(NamedTuple):
    """Rows over their deviations, and what their rounding depends on."""

    values: Tensor  # (..., width)
    deviation: Tensor  # (..., 1)
    reach: Tensor  # (..., 1), the largest value over the deviation; (..., width) for an RMSNorm
    growth: Tensor  # (..., 1), of the sums over a row, in u


def _standardized(x: Float[Tensor, "*rows width"], eps: float, centers: bool) -> Standardized:
    is_half, terms, x = PRECISIONS[x.dtype].is_half, x.shape[-1], _widen(x)
    centred = x - x.mean(-1, keepdim=True)
    centred = centred - centred.mean(-1, keepdim=True)  # the second mean is the rounding error of the first
    is_constant = (centred == 0).all(-1, keepdim=True)
    rows = centred if centers else x
    deviation = torch.sqrt(rows.square().mean(-1, keepdim=True) + eps)
    values = rows / deviation
    reach = x.abs().amax(-1, keepdim=True) / deviation
    if not centers:  # nothing cancels
        reach = values.abs() / (1 + values.abs())
    repeated = is_constant | (is_half & (reach > 32))  # a row of few different numbers
    growth = torch.where(repeated, sum_growth(terms, repeated=True), sum_growth(terms))
    return Standardized(values, deviation, reach, growth)


def _widen(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().double()
