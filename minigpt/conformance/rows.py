"""The inputs of a conformance run: kinds of float64 rows, so that every mistake shows in at least one."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor

Rows = Float[Tensor, "rows width"]
Weights = tuple[Float[Tensor, " width"], Float[Tensor, " width"]]

CONSTANTS = (0.0, 1.0, -2.5, 0.1, 10.0)
# Values whose squares overflow the input's dtype but not the statistics; values whose squares vanish beside eps
HUGE = {torch.float64: 1e100, torch.float32: 1e15, torch.bfloat16: 1e15, torch.float16: 6e4}
TINY = {torch.float64: 1e-160, torch.float32: 1e-20, torch.bfloat16: 1e-20, torch.float16: 1e-6}


def ordinary(rows: int, width: int, generator: Generator) -> Rows:
    """Return rows with deviations from 0.5 to 2 and means from -1 to 1. None is symmetric about 0."""
    scale = 0.5 + 1.5 * torch.rand(rows, 1, generator=generator, dtype=torch.float64)
    shift = 2 * torch.rand(rows, 1, generator=generator, dtype=torch.float64) - 1
    return _normal(rows, width, generator) * scale + shift


def far_from_zero(rows: int, width: int, generator: Generator) -> Rows:
    """Return rows with a mean a thousand times the deviation, alternately positive and negative."""
    side = 1 - 2 * (torch.arange(rows, dtype=torch.float64)[:, None] % 2)
    x = _normal(rows, width, generator)
    x[:, 0], x[:, 1] = 6, -6  # at 1000 bfloat16 has steps of 4, which must not make a row constant
    return x + 1000 * side


def near_eps(rows: int, width: int, generator: Generator) -> Rows:
    """Return rows with deviations from a tenth to ten times sqrt(1e-5): here eps decides the result."""
    return _normal(rows, width, generator) * 1e-5**0.5 * torch.logspace(-1, 1, rows, dtype=torch.float64)[:, None]


def massive(rows: int, width: int, generator: Generator) -> Rows:
    """Return rows like GPT-2's residual stream: values about 1, and two or three near 3,000 (arXiv 2402.17762)."""
    x = _normal(rows, width, generator)
    x[:, width // 3] += 3000
    x[:, width // 2] -= 2400
    x[::2, -1] += 900
    return x


def constant(rows: int, width: int, generator: Generator) -> Rows:
    """Return rows of one value each, whose norm is the bias."""
    values = torch.tensor(CONSTANTS, dtype=torch.float64)
    return values.repeat(-(-rows // len(values)))[:rows, None].expand(rows, width).clone()


def uniform(rows: int, width: int, generator: Generator) -> Rows:
    """Return values between -1 and 1, which a magnitude multiplies."""
    return 2 * torch.rand(rows, width, generator=generator, dtype=torch.float64) - 1


def transposed(x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
    """Return the same values, stored by columns."""
    return x.t().contiguous().t()


def ordinary_weights(width: int, generator: Generator) -> Weights:
    """Return a scale about 1 and a shift about 0.5 of either sign: scale 1 and shift 0 would hide mistakes."""
    return 1 + 0.7 * _normal(width, 1, generator)[:, 0], 0.5 + _normal(width, 1, generator)[:, 0]


def trained_weights(width: int, generator: Generator) -> Weights:
    """Return weights like those of a trained GPT-2: most about 0.2, some almost 0, a few from 10 to 20."""
    weight = 0.2 + 0.05 * _normal(width, 1, generator)[:, 0]
    weight[:: max(width // 16, 1)] = 1e-4
    weight[1 :: max(width // 4, 1)] = 10 + 10 * torch.rand(1, generator=generator, dtype=torch.float64)
    bias = 0.02 * _normal(width, 1, generator)[:, 0]
    bias[1 :: max(width // 4, 1)] = -3.0
    return weight, bias


class RowKind(NamedTuple):
    """One kind of row at every dtype, and the weights of the norm that gets it."""

    name: str
    tests: str
    make: Callable[[int, int, Generator], Rows]
    weights: Callable[[int, Generator], Weights] = ordinary_weights
    magnitudes: Mapping[torch.dtype, float] | None = None  # multiply the rows, by dtype

    def rows(self, rows: int, width: int, generator: Generator, dtype: torch.dtype) -> Rows:
        """Return rows in float64 for a test at ``dtype``, not yet rounded to it."""
        x = self.make(rows, width, generator)
        return x if self.magnitudes is None else x * self.magnitudes[dtype]


ORDINARY = RowKind("ordinary rows", "rows with different means and deviations", ordinary)
ROW_KINDS = [
    ORDINARY,
    RowKind("trained weights", "a few weights from 10 to 20, some almost 0", ordinary, trained_weights),
    RowKind("massive activations", "a few values near 3,000 among values about 1", massive),
    RowKind("mean far from 0", "a mean a thousand times the deviation", far_from_zero),
    RowKind("deviation near sqrt(eps)", "rows where eps decides the result", near_eps),
    RowKind("constant rows", "rows without deviation, whose norm is the bias", constant),
    RowKind("huge values", "values whose squares overflow the dtype of the input", uniform, magnitudes=HUGE),
    RowKind("tiny values", "values whose squares vanish beside eps", uniform, magnitudes=TINY),
]


def _normal(rows: int, width: int, generator: Generator) -> Rows:
    return torch.randn(rows, width, generator=generator, dtype=torch.float64)
