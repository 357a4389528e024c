"""The inputs of a conformance run: float64 rows of several kinds, so that every mistake shows on at least one."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor

Rows = Float[Tensor, "rows width"]
Weights = tuple[Float[Tensor, " width"], Float[Tensor, " width"]]

CONSTANTS = (0.0, 1.0, -2.5, 0.1, 10.0)
# Squares overflow the input's dtype, though not the statistics; vanish beside eps; are infinite even in the statistics
HUGE = {torch.float64: 1e100, torch.float32: 1e15, torch.bfloat16: 1e15, torch.float16: 6e4}
TINY = {torch.float64: 1e-160, torch.float32: 1e-20, torch.bfloat16: 1e-20, torch.float16: 1e-6}
OVERFLOWING = {torch.float64: 1e160, torch.float32: 1e20, torch.bfloat16: 1e20}  # float16 holds no such value


def ordinary(rows: int, width: int, generator: Generator) -> Rows:
    """Normal values of unlike rows: deviations from 0.5 to 2, means from -1 to 1. None is symmetric about 0."""
    scale = 0.5 + 1.5 * torch.rand(rows, 1, generator=generator, dtype=torch.float64)
    shift = 2 * torch.rand(rows, 1, generator=generator, dtype=torch.float64) - 1
    return _normal(rows, width, generator) * scale + shift


def far_from_zero(rows: int, width: int, generator: Generator) -> Rows:
    """A mean a thousand times the deviation, above and below 0 in turn."""
    side = 1 - 2 * (torch.arange(rows, dtype=torch.float64)[:, None] % 2)
    x = _normal(rows, width, generator)
    x[:, 0], x[:, 1] = 6, -6  # bfloat16 counts by fours up there, and should not be left with a constant row
    return x + 1000 * side


def near_eps(rows: int, width: int, generator: Generator) -> Rows:
    """Deviations about sqrt(1e-5), from a tenth to ten times: here eps, and where it is added, decides the result."""
    return _normal(rows, width, generator) * 1e-5**0.5 * torch.logspace(-1, 1, rows, dtype=torch.float64)[:, None]


def massive(rows: int, width: int, generator: Generator) -> Rows:
    """A residual stream as GPT-2's: values about 1, and two or three near 3,000 (arXiv 2402.17762)."""
    x = _normal(rows, width, generator)
    x[:, width // 3] += 3000
    x[:, width // 2] -= 2400
    x[::2, -1] += 900
    return x


def constant(rows: int, width: int, generator: Generator) -> Rows:
    """Rows of one value each: nothing but the bias should come out."""
    values = torch.tensor(CONSTANTS, dtype=torch.float64)
    return values.repeat(-(-rows // len(values)))[:rows, None].expand(rows, width).clone()


def uniform(rows: int, width: int, generator: Generator) -> Rows:
    """Values between -1 and 1, to be multiplied by a magnitude."""
    return 2 * torch.rand(rows, width, generator=generator, dtype=torch.float64) - 1


def transposed(x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
    """The same, by columns in memory."""
    return x.t().contiguous().t()


def with_no_numbers(x: Float[Tensor, "6 width"]) -> Float[Tensor, "6 width"]:
    """Rows, a NaN in row 1, an infinity in row 3 and two in row 4."""
    spoilt = x.clone()
    spoilt[1, 7] = torch.nan
    spoilt[3, 0], spoilt[4, 5], spoilt[4, 63] = torch.inf, -torch.inf, torch.inf
    return spoilt


def ordinary_weights(width: int, generator: Generator) -> Weights:
    """A scale about 1 and a shift about 0.5, both of either sign: nothing that scale 1 and shift 0 would hide."""
    return 1 + 0.7 * _normal(width, 1, generator)[:, 0], 0.5 + _normal(width, 1, generator)[:, 0]


def trained_weights(width: int, generator: Generator) -> Weights:
    """As training leaves them in GPT-2: most about 0.2, some all but 0, a few between 10 and 20."""
    weight = 0.2 + 0.05 * _normal(width, 1, generator)[:, 0]
    weight[:: max(width // 16, 1)] = 1e-4
    weight[1 :: max(width // 4, 1)] = 10 + 10 * torch.rand(1, generator=generator, dtype=torch.float64)
    bias = 0.02 * _normal(width, 1, generator)[:, 0]
    bias[1 :: max(width // 4, 1)] = -3.0
    return weight, bias


class RowKind(NamedTuple):
    """One kind of row at every dtype, and the weights it is met with."""

    name: str
    tests: str
    make: Callable[[int, int, Generator], Rows]
    weights: Callable[[int, Generator], Weights] = ordinary_weights
    magnitudes: Mapping[torch.dtype, float] | None = None  # what the rows are multiplied by

    def rows(self, rows: int, width: int, generator: Generator, dtype: torch.dtype) -> Rows:
        """Rows in float64, still to be rounded to ``dtype``."""
        x = self.make(rows, width, generator)
        return x if self.magnitudes is None else x * self.magnitudes[dtype]


ROW_KINDS = [
    RowKind("ordinary rows", "rows of unlike means and deviations", ordinary),
    RowKind("trained weights", "a few weights of 10 to 20, some all but 0", ordinary, trained_weights),
    RowKind("massive activations", "a few values near 3,000 among values about 1", massive),
    RowKind("mean far from 0", "a mean a thousand times the deviation", far_from_zero),
    RowKind("deviation near sqrt(eps)", "rows where eps decides the result", near_eps),
    RowKind("constant rows", "rows without any deviation: only the bias comes out", constant),
    RowKind("huge values", "values whose squares overflow the dtype of the input", uniform, magnitudes=HUGE),
    RowKind("tiny values", "values whose squares vanish beside eps", uniform, magnitudes=TINY),
]


def _normal(rows: int, width: int, generator: Generator) -> Rows:
    return torch.randn(rows, width, generator=generator, dtype=torch.float64)
