"""From failed cases to the name of the mistake. Inputs and outputs say it; no source code is read.

A norm has a wrong formula if another choice of parts than LayerNorm's gives its outputs. Each table of parts has
LayerNorm's own first, under no name. If the formula is right, the cases that fail say what is wrong.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.conformance.case import CaseResult
from minigpt.conformance.rows import ORDINARY, ROW_KINDS
from minigpt.conformance.subject import EPS, OTHER_EPS, Subject
from minigpt.conformance.truth import PRECISIONS
from minigpt.device import DTYPES, HALVES, dtype_name
from minigpt.errors import RAISED

BATCH = "a row depends on its batch"
UNSTEADY = "same input, same output"  # a norm that fails this case has no formula

# Mistakes beside the formula, by the cases that show them; "{}" is what "*" matches. Most mistakes of one table fail
# the cases of the next as well, so only the first table that says something counts.
SYMPTOMS = [
    {
        "input left as it was": "it modifies its input",
        "output left as it was": "its next call writes over its output",
        "weights that change": "it keeps its weights: it computes with them after they have changed",
    },
    {
        "*, ordinary rows": "wrong only for {} input",
        **{f"*, {kind.name}": f"wrong only for {kind.name}" for kind in ROW_KINDS[1:]},
        "*, mean far from 0": "wrong only for mean far from 0, where a difference of squares, E[x^2] - E[x]^2, cancels",
        "*, infinity and NaN": "wrong only where a row holds an infinity or a NaN",
        "non-contiguous: *": "wrong only for non-contiguous input: {}",
        "* input": "wrong only for {} input",
        "width *": "wrong only at width {}",
        "*[0-9] rows": "wrong only for {}",
        "residual added too": "wrong only where it adds the residual too, in add_norm",
        "any mode": "its values depend on training mode, or on whether gradients are kept",
        "a row in any company": BATCH,
    },
    {
        "no bias": "wrong only without a bias",
        "autocast": "wrong only under autocast",
        "another eps": "wrong only with another eps",
        "compiled *": "it differs under torch.compile",
    },
    {"gradients, ordinary rows": "gradients are wrong though values are right"},
    {"gradients, *": "gradients are wrong though values are right, in {}"},
]

WIDTH = 64
LIMIT = 1e-3  # a formula explains a norm's outputs to this relative accuracy
ONE_ROUNDING = 0.58  # RMS of one rounding's error over u, for errors spread evenly: 1 / sqrt(3)

WRONG = "normalizes over the wrong dimension: over {} of a (batch, sequence, width) input"
DIMENSIONS = {
    "": (-1,),
    WRONG.format("the sequence"): (1,),
    WRONG.format("the batch"): (0,),
    WRONG.format("batch and sequence"): (0, 1),
    WRONG.format("sequence and width together"): (1, 2),
    WRONG.format("the whole input"): (0, 1, 2),
}
MEANS = {"": 1, "the mean is not subtracted (it is an RMSNorm)": 0}
CORRECTIONS = {"": 0, "variance divides by n - 1": 1}
DIVISORS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "": lambda variance, eps: torch.sqrt(variance + eps),
    "eps is added to the deviation, not to the variance": lambda variance, eps: torch.sqrt(variance) + eps,
    "it divides by the variance: a square root is missing": lambda variance, eps: variance + eps,
}
EPSILONS = {"": EPS, "eps is left out": 0.0}
EPSILONS |= {f"eps looks like {eps:g}, not {EPS:g}": eps for eps in (1e-3, 1e-4, 1e-6, 1e-7, 1e-8, 1e-12)}
AFFINES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "": lambda y, scale, shift: y * scale + shift,
    "the shift is ignored": lambda y, scale, shift: y * scale,
    "the scale is ignored": lambda y, scale, shift: y + shift,
    "scale and shift are exchanged": lambda y, scale, shift: y * shift + scale,
    "it multiplies by 1 + scale": lambda y, scale, shift: y * (1 + scale) + shift,
}
FORMULAS: list[tuple[tuple[str, Any], ...]] = list(
    itertools.product(*(table.items() for table in (DIMENSIONS, MEANS, CORRECTIONS, DIVISORS, EPSILONS, AFFINES)))
)
FORMULAS.sort(key=lambda parts: sum(bool(mistake) for mistake, _ in parts))  # those with few mistakes first

# What LayerNorm's result does not depend on (arXiv 1607.06450, section 5.1)
INVARIANCES: dict[str, Callable[[Tensor], Tensor]] = {
    "the mean is not subtracted: a shift of the row changes the result": lambda x: x + 2,
    "it does not divide by the row's own deviation: four times the row gives another result": lambda x: 4 * x,
}


def diagnoses(subject: Subject, results: Sequence[CaseResult]) -> list[str]:
    """Return what is wrong with a norm that failed some of these cases, most important first; at least one sentence."""
    failed = [case for case in results if not case.passed]
    measured = [case for case in failed if not case.raised]
    if UNSTEADY in {case.name for case in measured}:
        return ["it answers differently from call to call"]
    found = wrong_formula(subject)
    narrow = {dtype_name(dtype) for dtype in HALVES if kept_in(dtype) in found}
    if len(found) == len(narrow):  # the formula is right, and half precision may hide another mistake
        found += _beside_the_formula([case for case in measured if not case.failed_at <= narrow])
    asked = [case for case in failed if not found or case.group not in ("gradients", "compile")]
    found += [case.note for case in asked if case.raised][:1]
    return found or [f"no mistake known by name; the first case that fails is {failed[0].name!r}"]


def _beside_the_formula(failed: list[CaseResult]) -> list[str]:
    """Return what these cases have in common. A norm that is wrong for all of float32 shows nothing."""
    ordinary = {f"{dtype}, {ORDINARY.name}": dtype for dtype in DTYPES}
    wrong = {ordinary[case.name] for case in failed if case.name in ordinary}
    rest = [case for case in failed if case.name in ordinary or not case.failed_at <= wrong]
    said = (_said(signs, [case.name for case in rest]) for signs in SYMPTOMS if "float32" not in wrong)
    return next(filter(None, said), [])


def _said(signs: dict[str, str], names: list[str]) -> list[str]:
    """Return the sentence of each sign that one of these cases is."""
    found = []
    for pattern, sentence in signs.items():
        before, _, after = pattern.partition("*")
        of_gradients = before.startswith("gradients")
        like = [name for name in names if fnmatchcase(name, pattern) and name.startswith("gradients") == of_gradients]
        if like:
            found.append(sentence.format(", ".join(name.removeprefix(before).removesuffix(after) for name in like)))
    return found


def wrong_formula(subject: Subject) -> list[str]:
    """Return the mistakes of formula and of precision, most important first. A norm that raises shows nothing."""
    subject, found = subject.drawing_for("diagnosis"), []
    with contextlib.suppress(*RAISED):
        mistakes = explained(subject)
        if mistakes is None:
            return unexplained(subject)
        found += mistakes
        found += ignored_eps(subject)
        found += narrow_statistics(subject)
    return found


@torch.no_grad()
def ask(
    subject: Subject,
    x: Float[Tensor, "*dims"],
    scale: float | Tensor = 1.0,
    shift: float | Tensor = 0.0,
    *,
    dtype: torch.dtype = torch.float32,
    eps: float = EPS,
) -> Float[Tensor, "*dims"]:
    """Return the norm of ``x`` (..., C) in float64 on the CPU; scale and shift are numbers or (C,) tensors."""
    blank = torch.ones(x.shape[-1], dtype=torch.float64)
    weights = blank * scale, blank * shift
    norm = subject.candidate(x.shape[-1], dtype, eps=eps, weights=lambda width, generator: weights)
    return norm(subject.put(x, dtype).clone()).cpu().double()  # a clone: it may be written into


def explained(subject: Subject) -> list[str] | None:
    """Return the mistakes of the first formula that gives the norm's outputs; None if none does."""
    deviation = torch.logspace(-6, 3, 24, dtype=torch.float64).view(4, 6, 1)
    x = deviation * (1 + _normal(subject, 4, 6, WIDTH))
    weights = 1 + 2 * _normal(subject, WIDTH), 1 + _normal(subject, WIDTH)  # of either sign
    y = ask(subject, x, *weights)
    for parts in FORMULAS:
        dims, mean, correction, divisor, eps, affine = (part for _, part in parts)
        centred = x - mean * x.mean(dims, keepdim=True)
        n = math.prod(x.shape[dim] for dim in dims)
        variance = centred.square().sum(dims, keepdim=True) / (n - correction)
        if alike(y, affine(centred / divisor(variance, eps), *weights)):
            return [mistake for mistake, _ in parts if mistake]
    return None


def unexplained(subject: Subject) -> list[str]:
    """Return what is wrong with a norm that no formula explains."""
    x = _normal(subject, 8, WIDTH)
    y, moved = ask(subject, x), x.clone()
    moved[:, 0] += 3
    if not y.isfinite().all():
        return ["it returns NaN or infinities for ordinary rows"]
    if torch.equal(ask(subject, moved)[:, 1:], y[:, 1:]):
        return ["each value is computed by itself, without the mean and the deviation of its row"]
    if not alike(y, torch.cat([ask(subject, row) for row in x.split(1)])):
        return [BATCH]
    if found := [said for said, change in INVARIANCES.items() if not alike(ask(subject, change(x)), y, 0.05)]:
        return found
    if shift_rounding(subject, torch.float32) >= 2**-14:  # one rounding leaves 2^-11 in float16, 2^-8 in bfloat16
        return ["statistics are kept in half precision, or in as few bits"]
    if rounded := [dtype_name(dtype) for dtype in HALVES if torch.equal(y.to(dtype).double(), y)]:
        return [f"its result is rounded to {rounded[0]}, also for float32 input"]
    if not alike(ask(subject, x, 2.0, 3.0), 2 * y + 3):
        return ["scale and shift are applied otherwise than in row * scale + shift"]
    return []


def ignored_eps(subject: Subject) -> list[str]:
    """Find out whether another eps changes nothing, in rows so small that it should."""
    x = EPS / 10 * _normal(subject, 8, WIDTH)  # smaller than eps, of the variance or of the deviation
    is_ignored = subject.takes_eps and torch.equal(ask(subject, x, 2.0, 3.0, eps=OTHER_EPS), ask(subject, x, 2.0, 3.0))
    return ["the eps it is given is ignored"] * is_ignored


def narrow_statistics(subject: Subject) -> list[str]:
    """Look for statistics of float16 or bfloat16 rows in that dtype."""
    return [kept_in(dtype) for dtype in HALVES if shift_rounding(subject, dtype) >= PRECISIONS[dtype].result / 8]


def kept_in(dtype: torch.dtype) -> str:
    """Return the diagnosis of statistics in the dtype of the input."""
    return f"statistics are kept in {dtype_name(dtype)} for {dtype_name(dtype)} input"


def shift_rounding(subject: Subject, dtype: torch.dtype, shift: float = 64.0) -> float:
    """Return how much a shift of the row changes the result, relative to the shift.

    LayerNorm does not change. Only its rounding does, which shows in how many bits a norm computes.
    """
    x = (2 * _normal(subject, 16, 64)).round() / 2  # exact at every dtype, also beside the shift
    off = distance(ask(subject, x + shift, dtype=dtype), ask(subject, x, dtype=dtype))
    return 0.0 if off > 1 else off / shift / ONE_ROUNDING  # more is not rounding: the mean is not subtracted


def distance(a: Tensor, b: Tensor) -> float:
    """Return RMS(a - b) / RMS(b)."""
    return ((a - b).square().mean().sqrt() / b.square().mean().sqrt().clamp(min=1e-300)).item()


def alike(a: Tensor, b: Tensor, limit: float = LIMIT) -> bool:
    """Return True if ``a`` equals ``b`` to a relative accuracy of ``limit``; NaN equals nothing."""
    return distance(a, b) <= limit


def _normal(subject: Subject, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=subject.generator, dtype=torch.float64)
