"""From failed cases to the name of the mistake. Inputs and outputs say it; no source code is read.

A norm has a wrong formula if another choice of parts than LayerNorm's gives its outputs or its gradients. Each table of
parts has LayerNorm's own first, under no name. If the formula is right, the cases that fail say what is wrong. If
nothing in the tables fits, the diagnosis says so, and where the difference is.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from minigpt.conformance.behaviour import overlapping
from minigpt.conformance.case import EPS, OTHER_EPS, CaseResult, Subject, place_of, worst_element
from minigpt.conformance.cases import gradients
from minigpt.conformance.truth import ORDINARY, PRECISIONS, ROW_KINDS, far_from_zero, massive, normal, ordinary
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
        "many calls": "it is right for the first calls, and wrong later",
    },
    {"*, mean far from 0": "wrong only for mean far from 0, where a difference of squares, E[x^2] - E[x]^2, cancels"},
    {
        "*, ordinary rows": "wrong only for {} input",
        **{f"*, {kind.name}": f"wrong only for {kind.name}" for kind in ROW_KINDS[1:] if kind.make != far_from_zero},
        "*, infinity and NaN": "wrong only where a row holds an infinity or a NaN",
        "non-contiguous: *": "wrong only for non-contiguous input: {}",
        "* input": "wrong only for {} input",
        "width *": "wrong only at width {}",
        "*[0-9] rows": "wrong only for {} rows",
        "batch of *": "wrong only for a batch of {}",
        "sequence of *": "wrong only for a sequence of {}",
        "any mode": "its values depend on training mode, or on whether gradients are kept",
        "a row in any company": BATCH,
    },
    {
        "no bias": "wrong only without a bias",
        "autocast": "wrong only under autocast",
        "half rows, float32 scale": "wrong only for rows in half precision with a float32 scale",
        "another eps": "wrong only with another eps",
        "compiled *": "it differs under torch.compile",
    },
    {"gradients, ordinary rows": "gradients are wrong though values are right"},
    {"gradients, *": "gradients are wrong though values are right, in {}"},
    {"*, bias and slope": "its errors have a bias, or its rows are too long or too short, at {}"},
]

OVERLAPPING = {  # what the case "overlapping calls" compares, for a gradient that is right by itself
    "the incoming gradient": "its backward pass changes the incoming gradient",
    "the gradient of the input, after another call": "its backward pass uses what a later call left",
    "the gradient of the input, once more": "its backward pass is right once, and wrong when it is repeated",
}

WIDTH = 64
LIMIT = 1e-4  # a formula explains a norm's outputs to this relative accuracy
FEW = 0.05  # of the results in half precision may differ from those of a formula
UNKNOWN = "no known mistake fits"
ROOT_TABLE = 2**-8  # the largest error of a hardware's estimate of 1 / sqrt(x): Arm's frsqrte; most have 2^-11 or less
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
MEANS = {"": 1, "the mean is not subtracted (it is an RMSNorm)": 0, "the mean is subtracted twice": 2}
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
EPSILONS = {"": EPS, "eps is left out": 0.0}
EPSILONS |= {f"eps looks like {eps:g}, not {EPS:g}": eps for eps in (1e-3, 1e-4, 1e-6, 1e-7, 1e-8, 1e-12)}
AFFINES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "": lambda y, scale, shift: y * scale + shift,
    "the shift is ignored": lambda y, scale, shift: y * scale,
    "the scale is ignored": lambda y, scale, shift: y + shift,
    "scale and shift are ignored": lambda y, scale, shift: y,
    "scale and shift are exchanged": lambda y, scale, shift: y * shift + scale,
    "it multiplies by 1 + scale": lambda y, scale, shift: y * (1 + scale) + shift,
    "the shift is added before the scale multiplies": lambda y, scale, shift: (y + shift) * scale,
}
STAGES = {  # what may be rounded to half precision on the way
    "the normalized row is rounded to {} before scale and shift": ("row",),
    "the normalized row is rounded to {} before scale and shift, and once more between": ("row", "product"),
    "the scaled row is rounded to {} before the shift": ("product",),
    "1 / deviation is rounded to {}": ("reciprocal",),
    "the deviation is rounded to {}": ("deviation",),
    "the mean is rounded to {}": ("mean",),
    "the centred row is rounded to {}": ("centred",),
    "the scale is rounded to {}": ("scale",),
    "the shift is rounded to {}": ("shift",),
    "its result is rounded to {}, also for float32 input": ("result",),
}
ROUNDINGS: dict[str, tuple[tuple[str, ...], torch.dtype]] = {"": ((), torch.float64)}
ROUNDINGS |= {said.format(dtype_name(d)): (stages, d) for said, stages in STAGES.items() for d in HALVES}
TABLES: list[Mapping[str, Any]] = [DIMENSIONS, MEANS, SPREADS, DIVISORS, EPSILONS, AFFINES, ROUNDINGS]

# The gradient of the input is (g - first * mean(g) - second * s * mean(g * s)) / deviation, with g = dy * weight
INCOMING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "": lambda dy, weight: dy * weight,
    "the scale is forgotten": lambda dy, weight: dy,
    "the scale is multiplied twice": lambda dy, weight: dy * weight * weight,
}
TERMS = {
    "": (1.0, 1.0),
    "the statistics are detached: neither mean nor variance passes a gradient": (0.0, 0.0),
    "the mean passes no gradient: mean(g) is not subtracted": (0.0, 1.0),
    "the mean is subtracted twice": (2.0, 1.0),
    "the second term, s * mean(g * s), is missing: the variance passes no gradient": (1.0, 0.0),
    "the second term has the wrong sign": (1.0, -1.0),
    "the second term is subtracted twice": (1.0, 2.0),
}
COUNTS = {  # how many fewer than n each of the two means is over
    "": (0, 0),
    "means are over n - 1": (1, 1),
    "the second term, s * mean(g * s), is over n - 1": (0, 1),
    "the first term, mean(g), is over n - 1": (1, 0),
}
DIVISIONS: dict[str, Callable[[Tensor], Tensor | float]] = {
    "": lambda deviation: deviation,
    "it is not divided by the deviation": lambda deviation: 1.0,
    "it is divided by the variance": lambda deviation: deviation**2,
    "eps is left out": lambda deviation: (deviation**2 - EPS).sqrt(),
}
SAVED = {"": ("", torch.float64)}
SAVED |= {f"1 / deviation is saved in {dtype_name(d)}": ("reciprocal", d) for d in HALVES}
SAVED |= {f"the normalized row is saved in {dtype_name(d)}": ("row", d) for d in HALVES}
SAVED |= {f"the incoming gradient is rounded to {dtype_name(d)}": ("dy", d) for d in HALVES}
FITTED = "a factor"  # which ``multiplied`` names
FACTORS = {"": 1.0, FITTED: None}
BACKWARD: list[Mapping[str, Any]] = [INCOMING, TERMS, COUNTS, DIVISIONS, SAVED, FACTORS]

# What LayerNorm's result does not depend on (arXiv 1607.06450, section 5.1)
NOT_CENTRED = "the mean is not subtracted, or not whole: a shift of the row changes the result"
NOT_SCALED = "it does not divide by the row's own deviation: four times the row gives another result"


class Diagnosis(str):
    """A sentence that names a mistake.

    Attributes:
        dtypes: the names of the dtypes that show it, if they are known.
    """

    dtypes: frozenset[str]

    def __new__(cls, sentence: str, dtypes: Iterable[str] = ()) -> "Diagnosis":
        diagnosis = super().__new__(cls, sentence)
        diagnosis.dtypes = frozenset(dtypes)
        return diagnosis


def most_important(diagnoses: Iterable[str], dtype: str) -> list[str]:
    """Return the diagnoses that are about ``dtype`` before those that are about other dtypes only."""
    return sorted(diagnoses, key=lambda sentence: dtype not in (getattr(sentence, "dtypes", None) or {dtype}))


def with_few(tables: Sequence[Mapping[str, Any]], most: int) -> list[tuple[list[str], list[Any]]]:
    """Return the choices of one part of each table with at most ``most`` mistakes, those with the fewest first."""
    chosen = []
    for mistakes in range(most + 1):
        for wrong in itertools.combinations(range(len(tables)), mistakes):
            parts = [[*table.items()][1:] if at in wrong else [("", table[""])] for at, table in enumerate(tables)]
            chosen += [([name for name, _ in pick if name], [part for _, part in pick])
                       for pick in itertools.product(*parts)]  # fmt: skip
    return chosen


def diagnoses(subject: Subject, results: Sequence[CaseResult]) -> list[str]:
    """Return what is wrong with a norm that failed some of these cases, most important first; at least one sentence."""
    failed = [case for case in results if not case.passed]
    measured = [case for case in failed if not case.raised]
    if UNSTEADY in {case.name for case in measured}:
        return ["it answers differently from call to call"]
    found = wrong_formula(subject, {dtype for case in failed for dtype in case.failed_at})
    narrow = {dtype for said in found if isinstance(said, Diagnosis) for dtype in said.dtypes}
    if len(found) == len(narrow):  # the formula is right, and half precision may hide another mistake
        rest = [case for case in measured if not case.failed_at <= narrow]
        found += wrong_backward(subject, rest) or _beside_the_formula(rest)
    asked = [case for case in failed if not found or case.group not in ("gradients", "compile")]
    found += [Diagnosis(case.note, case.failed_at) for case in asked if case.raised][:1]
    if any(said.startswith(BATCH) for said in found) and rounds_by_batch(subject):
        found = [_reworded(said, said.replace(BATCH, f"{BATCH}, in rounding only")) for said in found]
    return most_important(found or [f"{UNKNOWN}: {difference(subject, failed[0])}"], "float32")


def _reworded(diagnosis: str, sentence: str) -> Diagnosis:
    return Diagnosis(sentence, getattr(diagnosis, "dtypes", ()))


def _beside_the_formula(failed: list[CaseResult]) -> list[str]:
    """Return what these cases have in common. A norm that is wrong for all of float32 shows nothing."""
    ordinary = {f"{dtype}, {ORDINARY.name}": dtype for dtype in DTYPES}
    wrong = {ordinary[case.name] for case in failed if case.name in ordinary}
    rest = [case for case in failed if case.name in ordinary or not case.failed_at <= wrong]
    said = (_said(signs, rest) for signs in SYMPTOMS if "float32" not in wrong)
    return next(filter(None, said), [])


def _said(signs: dict[str, str], failed: list[CaseResult]) -> list[str]:
    """Return the sentence of each sign that one of these cases is, and where in the tensors it was wrong."""
    found = []
    for pattern, sentence in signs.items():
        before, _, after = pattern.partition("*")
        of_gradients = before.startswith("gradients")
        like = [
            case for case in failed
            if fnmatchcase(case.name, pattern) and case.name.startswith("gradients") == of_gradients
        ]  # fmt: skip
        if like:
            names = (case.name.removeprefix(before).removesuffix(after.replace("[0-9]", "")) for case in like)
            place = next((case.place for case in reversed(like) if case.place), "")
            sentence = sentence.format(", ".join(names)) + (f" ({place})" if place else "")
            found.append(Diagnosis(sentence, set().union(*(case.failed_at for case in like))))
    return found


def wrong_formula(subject: Subject, dtypes: set[str]) -> list[str]:
    """Return the mistakes of formula and of precision, most important first. A norm that raises shows nothing.

    Args:
        dtypes: those that are wrong.
    """
    subject, found = subject.drawing_for("diagnosis"), []
    with contextlib.suppress(*RAISED):
        mistakes = closest_formula(subject)
        if mistakes is None:
            return unexplained(subject)
        found += mistakes + ignored_eps(subject)
        if not found:
            found += flushed(subject) + cut_off(subject) + wrong_rows(subject) + wrong_lengths(subject)
        if not found:
            found += [said for d in HALVES if dtype_name(d) in dtypes for said in wrong_rounding(subject, d)]
            found += narrow_float64(subject) if "float64" in dtypes else []
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


def formula(x: Tensor, scale: Tensor, shift: Tensor, parts: Sequence[Any]) -> Tensor:
    """Return a norm of ``x`` that is made of these parts, one of each of ``TABLES``, in float64."""
    dims, mean, spread, divisor, eps, affine, (stages, dtype) = parts

    def at(stage: str, value: Tensor) -> Tensor:
        return value.to(dtype).double() if stage in stages else value

    centred = at("centred", x - mean * at("mean", x.mean(dims, keepdim=True)))
    n = math.prod(x.shape[dim] for dim in dims)
    row = at("row", centred * at("reciprocal", 1 / at("deviation", divisor(spread(centred, dims, n), eps))))
    if "product" in stages:
        return at("product", row * scale) + shift
    return at("result", affine(row, at("scale", scale), at("shift", shift)))


def closest_formula(subject: Subject) -> list[str] | None:
    """Return the mistakes of the formula that gives the norm's outputs best; None if none does."""
    deviation = torch.logspace(-6, 3, 24, dtype=torch.float64).view(4, 6, 1)
    x = (deviation * (1 + normal(subject.generator, 4, 6, WIDTH))).float().double()
    scale, shift = (  # of either sign
        (1 + spread * normal(subject.generator, WIDTH)).float().double() for spread in (2, 1)
    )
    y = ask(subject, x, scale, shift)
    return best((names, distance(y, formula(x, scale, shift, parts))) for names, parts in with_few(TABLES, 2))


def best(formulas: Iterable[tuple[list[str], float]], limit: float = LIMIT) -> list[str] | None:
    """Return the mistakes of the first formula that is about as close as the closest; None if none is close."""
    formulas = list(formulas)
    closest = min((off for _, off in formulas if not math.isnan(off)), default=math.inf)
    near = (names for names, off in formulas if off <= max(3 * closest, 2e-6))
    return next(near) if closest <= limit else None


def unexplained(subject: Subject) -> list[str]:
    """Return what is wrong with a norm that no formula explains."""
    x = normal(subject.generator, 8, WIDTH)
    y, moved = ask(subject, x), x.clone()
    moved[:, 0] += 3
    if not y.isfinite().all():
        return ["it returns NaN or infinities for ordinary rows"]
    if not y.any():
        return ["it returns 0 for ordinary rows, without scale and shift"]
    if found := wrong_rows(subject):
        return found
    if torch.equal(ask(subject, moved)[:, 1:], y[:, 1:]):
        return ["each value is computed by itself, without the mean and the deviation of its row"]
    if not alike(y, torch.cat([ask(subject, row) for row in x.split(1)])):
        return [BATCH]
    if found := wrong_lengths(subject):
        return found
    if found := [NOT_CENTRED] * keeps_mean(subject) + [NOT_SCALED] * (not alike(ask(subject, 4 * x), y, 0.05)):
        return found
    if shift_rounding(subject, torch.float32) >= 2**-14:  # one rounding leaves 2^-11 in float16, 2^-8 in bfloat16
        return ["statistics are kept in half precision, or in as few bits"]
    if not alike(ask(subject, x, 2.0, 3.0), 2 * y + 3):
        return ["scale and shift are applied otherwise than in row * scale + shift"]
    return cut_off(subject) + flushed(subject)


def difference(subject: Subject, failed: CaseResult) -> str:
    """Return where a norm that no rule explains differs from LayerNorm, and by how much."""
    subject = subject.drawing_for("difference")
    deviation = torch.logspace(-6, 3, 64, dtype=torch.float64)[:, None]
    x = (deviation * (1 + normal(subject.generator, 64, WIDTH))).float().double()
    y, true = torch.full_like(x, torch.nan), true_norm(x)
    with contextlib.suppress(*RAISED):
        y = ask(subject, x)
    off = (y - true).square().mean(-1).sqrt() / true.square().mean(-1).sqrt()
    wrong = off > LIMIT
    if not wrong.any():  # or it raised
        return f"the first case that fails is {str(failed).removeprefix('FAIL ')}"
    span = "every row" if wrong.all() else f"{int(wrong.sum())} of 64 rows, with deviations from {{:.1g}} to {{:.1g}}"
    return f"its values are off by {off[wrong].median():.2g} (RMS) in {span.format(*deviation[wrong].aminmax())}"


def true_norm(x: Tensor) -> Tensor:
    """Return LayerNorm of float64 rows, with scale 1 and shift 0."""
    return formula(x, torch.ones(()), torch.zeros(()), [table[""] for table in TABLES])


def wrong_rows(subject: Subject) -> list[str]:
    """Look for rows or columns that are wrong, by a rule, beside others that are right."""
    x = normal(subject.generator, 64, WIDTH)
    y, true = ask(subject, x), true_norm(x)
    wrong, right = (y - true).abs() > 0.01, (y - true).abs() < LIMIT
    place = place_of(wrong, y)
    is_rule = bool((right | wrong.any(-1, keepdim=True)).all()) or bool((right | wrong.any(0)).all())
    kind = "columns" if wrong.any(-1).all() else "rows"
    return [f"some {kind} are wrong: {place}"] * bool(place and is_rule)


def wrong_lengths(subject: Subject) -> list[str]:
    """Look for rows that are LayerNorm's but for their length: by a factor, another eps, or an approximate root.

    The error of a root that is read from a table or from the bits of a number depends on the deviation alone, and is
    the same for four times the deviation.
    """
    size = torch.logspace(-1, 1, 64, dtype=torch.float64)[:, None]
    x = (ordinary(64, WIDTH, subject.generator) * size).float().double()
    variance = x.var(-1, correction=0, keepdim=True)
    sides = 1 - 2 * (torch.arange(WIDTH, dtype=torch.float64) % 2)
    lengths = []
    for rows in (x, 4 * x, (x.mean(-1, keepdim=True) + variance.sqrt() * sides).float().double()):
        y, true = ask(subject, rows), true_norm(rows)
        lengths.append((y * true).sum(-1, keepdim=True) / true.square().sum(-1, keepdim=True))
        if not alike(y, lengths[-1] * true, 2e-6):
            return []
    length = lengths[0]
    error = (length - 1).abs().max().item()
    if error <= 16 * 2**-24:
        return []
    if (length - length.mean()).abs().max() < error / 16:
        return [f"rows are {_digits(length.mean().item())} times as long as they should be"]
    eps = ((variance + EPS) / length.square() - variance)[variance.argmin()].item()
    if (length - ((variance + EPS) / (variance + eps)).sqrt()).abs().max() < error / 16:
        return [f"eps looks like {eps:.2g}, not {EPS:g}"]
    is_root = error < ROOT_TABLE and all((other - length).abs().median() < error / 8 for other in lengths[1:])
    return [
        f"rows are too long or too short by up to {error:.1g}: 1 / deviation comes of an approximate root"
    ] * is_root


def keeps_mean(subject: Subject) -> bool:
    """Return True if a shift of the row moves all values of all rows to one side, as what is left of a mean does."""
    x = normal(subject.generator, 16, WIDTH)
    drift = (ask(subject, x + 2) - ask(subject, x)).mean(-1)
    return abs(drift.mean().item()) > max(1e-4, 2 * drift.std().item())


def flushed(subject: Subject) -> list[str]:
    """Look for inputs that are taken for 0."""
    x = normal(subject.generator, 8, WIDTH).sign() * (1 + torch.rand(8, WIDTH, generator=subject.generator).double())
    for size in (10.0**-power for power in range(2, 24)):
        if not ask(subject, size * x).any():
            return [f"small inputs are flushed to 0, such as {size:g}"]
    return []


def cut_off(subject: Subject) -> list[str]:
    """Look for a largest result that several rows share."""
    x = massive(32, 768, subject.generator)
    y, true = ask(subject, x), true_norm(x.float().double())
    limit = y.abs().max()
    is_cut = (y.abs() == limit).sum() > 8 and alike(y[y.abs() < limit], true[y.abs() < limit])
    return [f"its results are cut off (clipped) at {limit:g}"] * bool(is_cut)


def ignored_eps(subject: Subject) -> list[str]:
    """Find out whether another eps changes nothing, in rows so small that it should."""
    x = normal(subject.generator, 8, WIDTH)
    is_ignored = subject.takes_eps and all(  # smaller than eps, or so that a rounded result shows it too
        torch.equal(ask(subject, size * x, 2.0, 3.0, eps=OTHER_EPS), ask(subject, size * x, 2.0, 3.0))
        for size in (EPS / 10, OTHER_EPS * 10)
    )
    return ["the eps it is given is ignored"] * is_ignored


def wrong_rounding(subject: Subject, dtype: torch.dtype) -> list[str]:
    """Return what is rounded in rows of half precision beside the result: statistics, or a step on the way to it."""
    x = subject.put(ordinary(64, WIDTH, subject.generator), dtype).cpu().double()
    scale, shift = ((1 + spread * normal(subject.generator, WIDTH)).to(dtype).double() for spread in (0.7, 1))
    y, right = ask(subject, x, scale, shift, dtype=dtype), [table[""] for table in TABLES[:-1]]
    exact = {
        said: formula(x, scale, shift, [*right, part])
        for said, part in ROUNDINGS.items()
        if part[1] in (dtype, torch.float64)
    }
    shares = {said: (value.to(dtype).double() != y).double().mean().item() for said, value in exact.items()}
    shares["its result is truncated where it should be rounded"] = (
        (truncated(exact[""], dtype) != y).double().mean().item()
    )
    if shares[""] <= FEW:
        return []
    named = min(shares, key=lambda said: shares[said])
    if shares[named] <= FEW:
        return [Diagnosis(f"{named}, for {dtype_name(dtype)} input", [dtype_name(dtype)])]
    is_narrow = shift_rounding(subject, dtype) >= PRECISIONS[dtype].result / 8
    sentence = f"statistics are kept in {dtype_name(dtype)} for {dtype_name(dtype)} input"
    return [Diagnosis(sentence, [dtype_name(dtype)])] * is_narrow


def narrow_float64(subject: Subject) -> list[str]:
    """Find out whether float64 rows are computed in float32."""
    y = ask(subject, normal(subject.generator, 8, WIDTH), dtype=torch.float64)
    is_narrow = torch.equal(y.float().double(), y)
    return [Diagnosis("it computes in float32 for float64 input", ["float64"])] * is_narrow


def rounds_by_batch(subject: Subject) -> bool:
    """Return True if rows alone differ from rows among others by no more than rounding."""
    x = normal(subject.generator, 36, 768)
    alone = torch.cat([ask(subject, row) for row in x.split(1)])
    shapes = ((36, 768), (36, 1, 768))
    return all(alike(ask(subject, x.view(shape)).view(x.shape), alone, 8 * 2**-24) for shape in shapes)


def truncated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float64 numbers without the bits that ``dtype`` has no place for."""
    mantissa, exponent = torch.frexp(x)
    bits = 1 / PRECISIONS[dtype].result
    return torch.ldexp((mantissa * bits).trunc() / bits, exponent)


def wrong_backward(subject: Subject, failed: list[CaseResult]) -> list[str]:
    """Return the mistakes of the backward pass, if these cases say that it alone is wrong."""
    with contextlib.suppress(*RAISED):
        if any(case.name == "overlapping calls" for case in failed) and (said := wrong_when_overlapping(subject)):
            return said
    return wrong_gradients(subject, failed)


@torch.no_grad()
def wrong_when_overlapping(subject: Subject) -> list[str]:
    """Find out what spoils a gradient of the input that is right by itself."""
    norm, x, dy = subject.candidate(), subject.rows(12, WIDTH), subject.rows(12, WIDTH)
    norm.module.train()
    true = norm.gradient_truth(x, dy)["input"]
    if worst_element("", gradients(norm, norm, x, dy)["input"], *true[:2]).ratio > 1:
        return []
    compared = overlapping(subject.drawing_for("overlapping calls"), torch.float32)
    wrong = {one.what for one in compared if worst_element(*one).ratio > 1}
    return [sentence for what, sentence in OVERLAPPING.items() if what in wrong][:1]


def wrong_gradients(subject: Subject, failed: list[CaseResult]) -> list[str]:
    """Return the mistakes of the gradients, by formulas for each, at the dtype and size that show them."""
    parts = {part for case in failed for part in case.parts}
    if not parts or not parts <= {"input", "weight", "bias"}:
        return []
    dtypes = [dtype for name, dtype in DTYPES.items() if any(name in case.failed_at for case in failed)]
    subject = subject.drawing_for("gradients")
    with contextlib.suppress(*RAISED):
        for dtype, shape in itertools.product(dtypes, ((24, WIDTH), (7, 1040), (7, 4097), (2100, 96), (66_000, 16))):
            if mistakes := backward_mistakes(subject, dtype, *shape, parts):
                where = "" if shape == (24, WIDTH) else f", in {shape[0]:,} rows of {shape[1]:,}"
                where += "" if dtype == dtypes[0] == torch.float32 else f", for {dtype_name(dtype)} input"
                only = () if dtype == torch.float32 else (dtype_name(dtype),)
                return [Diagnosis(f"{said}{where}", only) for said in mistakes]
    return []


def backward_mistakes(subject: Subject, dtype: torch.dtype, rows: int, width: int, parts: set[str]) -> list[str]:
    """Return the mistakes of those gradients of ``rows`` rows at ``dtype`` that ``parts`` names.

    If no mistake fits a gradient, the size and the place of its error are returned.
    """
    norm = subject.candidate(width, dtype)
    norm.module.train()
    spread = torch.logspace(-2, 1, rows, dtype=torch.float64)[:, None]
    x, dy = (
        subject.put(spread * ordinary(rows, width, subject.generator), dtype),
        subject.rows(rows, width, dtype=dtype),
    )
    got = {name: value.cpu().double() for name, value in gradients(norm, norm, x, dy.clone()).items()}
    x, dy, weight = (tensor.detach().cpu().double() for tensor in (x, dy, norm.module.weight))
    limit, mistakes = 2 * PRECISIONS[dtype].result + LIMIT, dict[str, list[str]]()
    if "input" in parts:
        value = got["input"] * torch.sqrt(x.var(-1, correction=0, keepdim=True) + EPS)
        right, most = [table[""] for table in BACKWARD[:-1]], 2 if rows * width < 3000 else 1
        named = best(
            (
                with_factor(names, value, slope(choice[:-1], x, dy, weight), fit=choice[-1] is None)
                for names, choice in with_few(BACKWARD, most)
            ),
            limit,
        )
        mistakes["input"] = [unknown(value, slope(right, x, dy, weight), limit)] if named is None else named
    for name, terms in row_sums(x, dy, weight).items():
        if name in parts:
            total, whole = got[name], terms[""].sum(0)
            sums = {said: term.sum(0) for said, term in terms.items()}
            sums |= {"it is the mean over the rows, not the sum": whole / rows}
            narrow = HALVES if dtype not in HALVES else ()
            sums |= {f"it is rounded to {dtype_name(half)}": whole.to(half).double() for half in narrow}
            totals = [([said] * bool(said), distance(total, value)) for said, value in sums.items()]
            named = best([*totals, with_factor([FITTED], total, whole, fit=True)], limit)
            named = lost_rows(total, terms[""], dtype) if named is None else named
            mistakes[name] = [unknown(total, whole, limit)] if named is None else named
    return [f"the gradient of the {name} is wrong: {one}" for name, named in mistakes.items() for one in named]


def slope(parts: Sequence[Any], x: Tensor, dy: Tensor, weight: Tensor) -> Tensor:
    """Return a gradient of the input (rows, width) of these parts of ``BACKWARD``, times the deviation.

    So all rows count alike.
    """
    incoming, (first, second), (fewer, fewer_second), division, (stage, half) = parts
    deviation, n = torch.sqrt(x.var(-1, correction=0, keepdim=True) + EPS), x.shape[-1]
    at = {"dy": dy, "row": true_norm(x), "reciprocal": torch.ones_like(deviation) / division(deviation)}
    at |= {stage: at[stage].to(half).double()} if stage else {}
    g, s = incoming(at["dy"], weight), at["row"]
    along = s * (g * s).sum(-1, keepdim=True) / (n - fewer_second)
    return (g - first * g.sum(-1, keepdim=True) / (n - fewer) - second * along) * at["reciprocal"] * deviation


def row_sums(x: Tensor, dy: Tensor, weight: Tensor) -> dict[str, dict[str, Tensor]]:
    """Return terms (rows, width) whose sums the gradients of weight and bias may be, the right ones under no name."""
    s, deviation = true_norm(x), torch.sqrt(x.var(-1, correction=0, keepdim=True) + EPS)
    of_weight = {
        "": dy * s, "the row is not normalized": dy * x, "the scale is multiplied in": dy * weight * s,
        "the row is not divided by its deviation": dy * s * deviation, "it is 0": 0 * dy,
    }  # fmt: skip
    of_bias = {"": dy, "the scale is multiplied in": dy * weight, "it is 0": 0 * dy}
    for half in HALVES:
        name, reciprocal = dtype_name(half), (1 / deviation).to(half).double()
        of_weight[f"the normalized row is saved in {name}"] = dy * s.to(half).double()
        of_weight[f"1 / deviation is saved in {name}"] = dy * s * deviation * reciprocal
        of_weight[f"the incoming gradient is rounded to {name}"] = dy.to(half).double() * s
        of_bias[f"the incoming gradient is rounded to {name}"] = dy.to(half).double()
    return {"weight": of_weight, "bias": of_bias}


def with_factor(names: list[str], value: Tensor, expected: Tensor, *, fit: bool) -> tuple[list[str], float]:
    """Return the names and the distance. If ``fit``, the best factor is applied, and the last name becomes its name."""
    if not fit:
        return names, distance(value, expected)
    factor = ((value * expected).sum() / expected.square().sum().clamp(min=1e-300)).item()
    return [*names[:-1], multiplied(factor)], distance(value, factor * expected)


def multiplied(factor: float) -> str:
    """Return the name of a constant factor."""
    signs = {0: "it is 0", -1: "it has the wrong sign"}
    return next(
        (name for exact, name in signs.items() if abs(factor - exact) < 1e-3), f"it is multiplied by {_digits(factor)}"
    )


def _digits(factor: float) -> str:
    return f"{factor:.3g}" if abs(factor - 1) > 0.01 else f"{factor:.6g}"


def unknown(value: Tensor, expected: Tensor, limit: float) -> str:
    """Return how far a gradient is from the right one, and where."""
    wrong = (value - expected).abs() > 3 * limit * expected.square().mean().sqrt()
    place = place_of(wrong, value)
    return f"{UNKNOWN}, it is off by {distance(value, expected):.2g} (relative RMS)" + (f", {place}" if place else "")


def lost_rows(total: Tensor, terms: Float[Tensor, "rows width"], dtype: torch.dtype) -> list[str] | None:
    """Return which rows a sum leaves out (those behind or before one), or that it is kept in few bits, or None.

    Such a sum is a number of half precision, and its error grows as the root of the number of random roundings.
    """
    so_far, whole = terms.cumsum(0), terms.sum(0)
    for said, sums in (("rows from {:,} on are left out", so_far), ("rows before {:,} are left out", whole - so_far)):
        off = (sums - total).square().sum(-1).sqrt() / whole.square().sum().sqrt()
        last = int(off.argmin())
        if off[last] <= 4 * PRECISIONS[dtype].result + LIMIT and off[last] < distance(total, whole) / 4:
            return [said.format(last + 1)]
    is_half = any(
        torch.equal(total.to(half).double(), total)
        and distance(total, whole) < PRECISIONS[half].result * math.sqrt(len(terms))
        for half in HALVES
    )
    return [f"its sum over {len(terms):,} rows is kept in half precision"] if is_half else None


def shift_rounding(subject: Subject, dtype: torch.dtype, shift: float = 64.0) -> float:
    """Return how much a shift of the row changes the result, relative to the shift.

    LayerNorm does not change. Only its rounding does, which shows in how many bits a norm computes.
    """
    x = (2 * normal(subject.generator, 16, 64)).round() / 2  # exact at every dtype, also beside the shift
    off = distance(ask(subject, x + shift, dtype=dtype), ask(subject, x, dtype=dtype))
    return 0.0 if off > 1 else off / shift / ONE_ROUNDING  # more is not rounding: the mean is not subtracted


def distance(a: Tensor, b: Tensor) -> float:
    """Return RMS(a - b) / RMS(b)."""
    return ((a - b).square().mean().sqrt() / b.square().mean().sqrt().clamp(min=1e-300)).item()


def alike(a: Tensor, b: Tensor, limit: float = 1e-3) -> bool:
    """Return True if ``a`` equals ``b`` to a relative accuracy of ``limit``; NaN equals nothing."""
    return distance(a, b) <= limit
