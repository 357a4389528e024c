"""Rounding of a norm in half precision: each step of its formula, rounded to the dtype of its input or not.

A way of rounding has a name if it gives the norm's bits. All other arithmetic is float64 here, where a norm has
float32: that moves few values to other bits.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from minigpt.conformance.compare import distance
from minigpt.conformance.subject import Subject
from minigpt.conformance.truth import PRECISIONS, normal, ordinary
from minigpt.norms.formulas import GPT2_EPS
from minigpt.precision import cut, dtype_name

SHOWS = 0.2  # of a rounding: a right norm in another order of sums is closer to the right bits
TOO_FEW = "it computes in too few bits for {dtype} input: "
STATISTICS = {  # by the steps that are rounded
    ("mean",): "the mean is rounded to {dtype}",
    ("variance",): "the variance is rounded to {dtype}",
    ("inverse",): "1 / deviation is rounded to {dtype}",
    ("mean", "variance"): "mean and variance are rounded to {dtype}",
}
OF_RMS_NORM = {
    ("variance",): "the mean square is rounded to {dtype}",
    ("inverse",): "1 / sqrt(mean square) is rounded to {dtype}",
}
SCALED = {
    ("row",): "it rounds its row to {dtype} before the scale multiplies it, and again after",
    ("product",): "it rounds row * scale to {dtype} before the shift is added, and again after",
    ("row", "product"): "it rounds to {dtype} three times: its row, row * scale, and the result",
}
CUT = "its results are cut to {dtype}, not rounded to the nearest number"
ONE_PASS = "the variance is E[x^2] - E[x]^2, a difference of numbers that are rounded to {dtype}"
EVERY_STEP = ("mean", "centred", "squares", "variance", "sum", "inverse", "row", "product")


@dataclasses.dataclass(frozen=True)
class Way:
    """A way of rounding.

    Attributes:
        steps: the steps that are rounded to the dtype, of those in ``EVERY_STEP``; the result always is.
        name: the mistake; "" for a right way. ``{dtype}`` is replaced by the dtype's name.
        one_pass: the variance is E[x^2] - E[x]^2.
        is_about_own_mean: the variance is about the mean before it is rounded.
        divides: by the deviation, in place of a product with its inverse.
        scale_first: the scale multiplies the inverse, and their product the row.
        cuts: the result is cut, not rounded.
    """

    steps: tuple[str, ...] = ()
    name: str = ""
    one_pass: bool = False
    is_about_own_mean: bool = False
    divides: bool = False
    scale_first: bool = False
    cuts: bool = False

    def apply(self, x: Tensor, scale: Tensor, shift: Tensor, dtype: torch.dtype, centers: bool) -> Tensor:
        """Return the norm of float64 rows ``x`` (rows, width) that rounds in this way, in float64."""

        def rounded(step: str, value: Tensor) -> Tensor:
            return value.to(dtype).double() if step in self.steps else value

        exact_mean = x.mean(-1, keepdim=True) if centers else torch.zeros_like(x[:, :1])
        mean = rounded("mean", exact_mean)
        centred = rounded("centred", x - mean) if centers else x
        if self.one_pass:
            squares = rounded("squares", rounded("squares", x * x).mean(-1, keepdim=True))
            variance = squares - rounded("squares", mean * mean)
        elif self.is_about_own_mean:
            variance = (x - exact_mean).square().mean(-1, keepdim=True)
        else:
            variance = rounded("squares", centred.square()).mean(-1, keepdim=True)
        total = rounded("sum", rounded("variance", variance) + GPT2_EPS)
        if self.scale_first:
            factor = rounded("product", rounded("inverse", total.rsqrt()) * scale)
            product = rounded("product", centred * factor)
        elif self.divides:
            row = rounded("row", centred / rounded("inverse", total.sqrt()))
            product = rounded("product", row * scale)
        else:
            row = rounded("row", centred * rounded("inverse", total.rsqrt()))
            product = rounded("product", row * scale)
        y = product + shift
        return cut(y, dtype) if self.cuts else y.to(dtype).double()


def right_ways(centers: bool) -> list[Way]:
    """Return the ways that are allowed: once, and for an RMSNorm also its row before, as Llama's norms round."""
    if centers:
        return [Way()]
    return [Way(), Way(("row",))]


def wrong_ways(centers: bool) -> Iterator[Way]:
    """Yield the ways that are mistakes, those with the fewest roundings first."""
    statistics = STATISTICS if centers else OF_RMS_NORM
    for way in right_ways(centers):
        yield dataclasses.replace(way, name=CUT, cuts=True)
    for steps, name in SCALED.items():
        if centers or "product" in steps:
            yield Way(steps, name)
    for (steps, name), more in itertools.product(statistics.items(), [(), *SCALED]):
        yield Way((*steps, *more), TOO_FEW + name)
        if steps == ("mean", "variance"):
            yield Way((*steps, *more), TOO_FEW + name, is_about_own_mean=True)
    name = TOO_FEW + OF_RMS_NORM["variance",]
    if centers:
        name = TOO_FEW + STATISTICS["mean", "variance"]
    for about_own, divides, first in itertools.product((False, True), repeat=3):
        yield Way(EVERY_STEP, name, is_about_own_mean=about_own, divides=divides, scale_first=first)
    if centers:
        for steps in (("mean", "squares", "variance"), EVERY_STEP):
            for divides, first in itertools.product((False, True), repeat=2):
                yield Way(steps, TOO_FEW + ONE_PASS, one_pass=True, divides=divides, scale_first=first)


def otherwise_rounded(subject: Subject, dtype: torch.dtype) -> list[str]:
    """Return where a norm rounds in half precision, if it is otherwise than it should and a known way gives its bits.

    A scale or a shift that the module lacks is left at 1 or 0, where it rounds nothing.
    """
    width = 64
    adapted = subject.candidate(width, dtype).adapted
    x = ordinary(256, width, subject.generator).to(dtype).double()
    scale = (1 + 0.7 * normal(subject.generator, width)).to(dtype).double()
    shift = (0.5 + normal(subject.generator, width)).to(dtype).double()
    if adapted and adapted.multiplies:
        scale = torch.ones_like(scale)
    if adapted and adapted.adds:
        shift = torch.zeros_like(shift)
    y = subject.ask(x, scale, shift, dtype)

    def off(way: Way) -> float:
        return distance(y, way.apply(x, scale, shift, dtype, subject.centers))

    by_right = min(off(way) for way in right_ways(subject.centers))
    if not by_right > SHOWS * PRECISIONS[dtype].result:
        return []
    offs = [(way, off(way)) for way in wrong_ways(subject.centers)]
    closest = min(distance for _, distance in offs)
    if closest > by_right / 2:
        return []
    way = next(way for way, distance in offs if distance <= 1.3 * closest)
    return [way.name.format(dtype=dtype_name(dtype))]
