"""Ask a norm for outputs that no case asks for, and find the formula or the property that explains them."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minigpt.conformance.compare import distance
from minigpt.conformance.subject import Subject
from minigpt.conformance.truth import PRECISIONS, normal, ordinary
from minigpt.norms.formulas import deviation, exact_norm, formula, tables
from minigpt.precision import HALVES, dtype_name

LIMIT = 1e-4  # a formula explains a norm's outputs to this relative accuracy
MOST_MISTAKES = 2  # in one formula
Tables = Sequence[Mapping[str, Any]]  # of parts
NamedParts = tuple[list[str], list[Any]]  # the names of the mistakes, and a part of each table
PROBES = {"3-D input": (4, 6, 64), "2-D input": (24, 64), "width 192": (24, 192)}


def agreed(subject: Subject, dtype: torch.dtype) -> list[str]:
    """Return the mistakes of the formula of the outputs."""
    by_probe: dict[str, list[str] | None] = {}
    likeliest: list[str] | None = None
    for probe, shape in PROBES.items():
        by_probe[probe] = closest_formula(subject, dtype, shape, likeliest)
        likeliest = likeliest or by_probe[probe]
    return of_probes(by_probe)


def of_probes(by_probe: Mapping[str, list[str] | None]) -> list[str]:
    """Return the mistakes that explain every probe but those that are right; none if a probe is unexplained."""
    wrong = {probe: mistakes for probe, mistakes in by_probe.items() if mistakes != []}
    if not wrong:
        return []
    first, *others = wrong.values()
    if not first or any(mistakes != first for mistakes in others):
        return []
    if len(wrong) == len(by_probe):
        return first
    where = f"at {' and '.join(wrong)} only"
    return [f"{mistake}, {where}" for mistake in first]


def closest_formula(
    subject: Subject, dtype: torch.dtype, shape: tuple[int, ...], likeliest: list[str] | None = None
) -> list[str] | None:
    """Return the mistakes of the formula that gives the norm's outputs best; None if none does.

    Of formulas that are as close, the one with the mistakes that another input has shown comes first.
    """
    least = -6
    if dtype in HALVES:
        least = -4
    deviations = torch.logspace(least, 3, 24, dtype=torch.float64)
    deviation = deviations.view(*shape[:-1], 1)
    x = (deviation * (1 + normal(subject.generator, *shape))).to(dtype).double()
    scale = (1 + 2 * normal(subject.generator, shape[-1])).to(dtype).double()
    shift = (1 + normal(subject.generator, shape[-1])).to(dtype).double()
    y = subject.ask(x, scale, shift, dtype)
    formulas = []
    by_name = tables(subject.kind)
    for names, chosen in with_few([*by_name.values()]):
        parts = dict(zip(by_name, chosen, strict=True))
        formulas.append((names, distance(y, formula(x, parts, scale, shift))))
    formulas.sort(key=lambda candidate: candidate[0] != likeliest)
    return best(formulas, LIMIT + 2 * PRECISIONS[dtype].result)


def with_few(tables: Tables) -> list[NamedParts]:
    """Return the choices of one part of each table with at most ``MOST_MISTAKES``, the fewest first."""
    choices = []
    for mistakes in range(MOST_MISTAKES + 1):
        for wrong in itertools.combinations(range(len(tables)), mistakes):
            choices += _choices(tables, wrong)
    return choices


def _choices(tables: Tables, wrong: tuple[int, ...]) -> list[NamedParts]:
    """Return the choices of a mistake in each of the tables at the places ``wrong``, and of none in the others."""
    parts = []
    for at, table in enumerate(tables):
        right, *mistakes = table.items()
        if at in wrong:
            parts.append(mistakes)
        else:
            parts.append([right])
    choices = []
    for choice in itertools.product(*parts):
        names, chosen = zip(*choice, strict=True)
        choices.append((list(filter(None, names)), list(chosen)))
    return choices


def best(formulas: Iterable[tuple[list[str], float]], limit: float) -> list[str] | None:
    """Return the mistakes of the first formula that is about as close as the closest; None if none is close."""
    finite = [(names, off) for names, off in formulas if not math.isnan(off)]
    closest = min((off for _, off in finite), default=math.inf)
    if closest > limit:
        return None
    about_closest = max(3 * closest, 2e-6)
    for names, off in finite:
        if off <= about_closest:
            return names
    return None


def reciprocal(subject: Subject, dtype: torch.dtype) -> list[str]:
    """Return how 1 / deviation is rounded, if each row is right but for a factor near 1, above it or below."""
    x = subject.put(ordinary(64, 1024, subject.generator), dtype).cpu().double()
    y, true = subject.ask(x, dtype=dtype), exact_norm(x, subject.kind)
    factor = (y * true).sum(-1, keepdim=True) / true.square().sum(-1, keepdim=True)
    off = (factor - 1).abs().max().item()
    above = (factor > 1).double().mean().item()
    is_of_rows = 16 * PRECISIONS[dtype].result < off < 0.01 and distance(y, factor * true) < off / 8
    if not is_of_rows or not 0.2 < above < 0.8:
        return []
    inverse = factor / deviation(x, subject.kind)
    for narrow in HALVES:
        if distance(inverse.to(narrow).double(), inverse) < off / 64:
            return [f"1 / deviation is rounded to {dtype_name(narrow)}"]
    bits = math.ceil(-math.log2(off) - 0.25)
    return [f"1 / deviation has {bits} bits, as an approximate reciprocal root: rows are off by up to {off:.1g}"]


def precision(subject: Subject, dtype: torch.dtype) -> list[str]:
    """Return whether a norm computes in too few bits.

    It does so if its rows are about right and all fit a narrower dtype, or are off by some roundings in half
    precision.
    """
    x = subject.put(ordinary(64, 64, subject.generator), dtype).cpu().double()
    y, u = subject.ask(x, dtype=dtype), PRECISIONS[dtype].result
    off = distance(y, exact_norm(x, subject.kind))
    is_of_few_roundings = dtype in HALVES and off <= 4 * u
    is_narrow = off <= 0.1 and _fits_narrower(y, u)
    if is_of_few_roundings or is_narrow:
        return [f"it computes in too few bits for {dtype_name(dtype)} input"]
    return []


def _fits_narrower(y: Tensor, u: float) -> bool:
    for dtype, precision in PRECISIONS.items():
        is_narrower = precision.result > u
        if is_narrower and torch.equal(y.to(dtype).double(), y):
            return True
    return False


def structure(subject: Subject, dtype: torch.dtype) -> list[str]:
    """Return which values of a row, or which rows, a result is computed from, if not from its row."""
    x = normal(subject.generator, 8, 64)
    y, moved = subject.ask(x, dtype=dtype), x.clone()
    moved[:, 0] += 3
    if not y.isfinite().all():
        return ["it returns NaN or infinities for ordinary rows"]
    if not y.any():
        return ["it returns 0 for ordinary rows, without scale and shift"]
    changed = (subject.ask(moved, dtype=dtype) != y).any(0)  # (C,)
    group = int(changed.sum())
    if group < 2 and changed[:group].all():
        return ["each value is computed by itself, without the statistics of its row"]
    if group < 64 and changed[:group].all():
        return [f"each {group} of the 64 values of a row are normalized by themselves"]
    alone = torch.cat([subject.ask(row, dtype=dtype) for row in x.split(1)])
    if distance(alone, y) > 1e-3:
        return ["a row depends on its batch"]
    return []


def symptoms(subject: Subject, dtype: torch.dtype) -> list[str]:
    """Return a property of the outputs of a norm that is wrong for all inputs, and that no formula explains."""
    x = normal(subject.generator, 8, 64)
    y = subject.ask(x, dtype=dtype)
    moved = subject.ask(x + 2, dtype=dtype)
    drift = (moved - y).mean(-1)  # what is left of a mean moves all values to one side
    usual = max(1e-4, 2 * drift.std().item())
    if subject.centers and drift.mean().abs() > usual:
        return ["the mean is not subtracted, or not whole: a shift of the row changes the result"]
    if distance(subject.ask(4 * x, dtype=dtype), y) > 0.05:
        return ["it does not divide by the row's own deviation: four times the row gives another result"]
    changed = subject.ask(x, 2.0, 3.0, dtype)
    rounding = 1e-3 + 4 * PRECISIONS[dtype].result
    if distance(changed, 2 * y + 3) > rounding:
        return ["scale and shift are applied otherwise than in row * scale + shift"]
    return []
