"""From failed cases to the name of the mistake. Inputs and outputs say it; no source code is read.

A formula is named if it gives the norm's numbers at every probe: another rank, another width. If it gives them at some
probes, the diagnosis says at which. If nothing fits, it says which inputs are right, which are wrong, and by how much.
"""

import contextlib
import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minigpt.conformance.case import EPS, CaseResult, Subject
from minigpt.conformance.cases import gradients
from minigpt.conformance.mistakes import BACKWARD, SUMS, TABLES, deviation_of, formula, slope, true_norm
from minigpt.conformance.truth import ORDINARY, PRECISIONS, PRUNED, ROW_KINDS, normal, ordinary
from minigpt.device import DTYPES, HALVES, dtype_name
from minigpt.errors import RAISED

FEW, MOST = 6, 3  # items that are listed, and patterns
FAR = 100  # times the bound is no accident
LIMIT = 1e-4  # a formula explains a norm's outputs to this relative accuracy
UNKNOWN = "no known mistake fits"
PROBES = {"3-D input": (4, 6, 64), "2-D input": (24, 64), "width 192": (24, 192)}
BACKWARD_PROBES = PROBES | {"600 rows": (600, 768)}

# The cases that show a mistake
UNSTEADY = {
    "same input, same output": "it answers differently from call to call",
    "same input, same output, in training": "it answers differently from call to call, in training",
    "many calls": "it is right for the first calls, and wrong later",
    "calls are independent": "it remembers an earlier input",
}
CALLS = {
    "input left as it was": "it modifies its input",
    "output left as it was": "its next call writes over its output",
    "weights that change": "it keeps its weights: it computes with them after they have changed",
    "incoming gradient left as it was": "its backward pass changes the incoming gradient",
    "backward after another call": "its backward pass uses what a later call left",
    "backward twice": "its backward pass is right once, and wrong when it is repeated",
}
# Regular expressions for names of cases; what stands in parentheses is shown
NUMBERS = {
    "width ([0-9,]+)": "widths",
    "([0-9,]+) rows": "numbers of rows",
    "batch of ([0-9,]+)": "batch sizes",
    "sequence of ([0-9,]+)": "sequence lengths",
}
INPUTS = {
    "(.+) input": "wrong only for {} input",
    "non-contiguous: (.+)": "wrong only for non-contiguous input: {}",
    **{re.escape(kind.name): f"wrong only for {kind.name}" for kind in ROW_KINDS[1:]},
    "infinity and NaN": "wrong only where a row holds an infinity or a NaN",
    "any mode": "its values depend on training mode, or on whether gradients are kept",
    "rows are independent of the batch": "a row depends on its batch",
}
SYMPTOMS: list[dict[str, str]] = [  # most mistakes of one table fail the cases of the next, so the first one counts
    {"mean far from 0": "wrong only for mean far from 0, where a difference of squares, E[x^2] - E[x]^2, cancels"},
    INPUTS,
    {
        "no bias": "wrong only without a bias",
        "autocast": "wrong only under autocast",
        "another eps": f"wrong with another eps than {EPS:g}, as if the argument were ignored",
        "compiled .+": "it differs under torch.compile",
    },
    {"roundings": "it rounds otherwise than once, or before the weight multiplies the row and after"},
    {"bias and slope": "its errors have a bias, or its rows are too long or too short"},
]


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """A sentence that names a mistake, and the names of the dtypes that show it; none if all do."""

    sentence: str
    dtypes: frozenset[str] = frozenset()


# --- From the cases to the diagnoses ---

Results = Sequence[CaseResult]
Mistakes = list[tuple[str, set[str]]]  # a sentence, and the names of the dtypes that show it; none for all


def diagnoses(subject: Subject, results: Results) -> list[Diagnosis]:
    """Return what is wrong with a norm that failed some of these cases, most important first; at least one."""
    judged = set[str]().union(*(case.dtypes for case in results))
    diagnoses = []
    for sentence, dtypes in mistakes_of(subject, results):
        if not dtypes or dtypes == judged:
            diagnoses.append(Diagnosis(sentence))
            continue
        *first, last = sorted(dtypes)
        at = f"{', '.join(first)} and {last}" if first else last
        diagnoses.append(Diagnosis(sentence if at in sentence else f"{sentence}, at {at}", frozenset(dtypes)))
    return diagnoses


def mistakes_of(subject: Subject, results: Results) -> Mistakes:
    """Return the mistakes of a norm: of its calls, its outputs and its gradients, and what it raises."""
    wrong = {case.name: case for case in results if case.wrong_at}
    numbers = {name for name, case in wrong.items() if not math.isnan(case.worst.error or 0)}  # a NaN tells nothing
    for name in UNSTEADY:
        if name in numbers:
            return [(UNSTEADY[name], wrong[name].wrong_at)]  # it has no formula
    mistakes = [(CALLS[name], wrong[name].wrong_at) for name in CALLS if name in numbers]
    rest = [case for case in wrong.values() if not (case.name in CALLS and case.name in numbers)]
    ordinary_at = wrong[ORDINARY.name].wrong_at if ORDINARY.name in wrong else set[str]()
    if "float32" in ordinary_at:
        mistakes += of_outputs(subject, "float32", rest, results)
    else:
        others = [case for case in (case.beside(ordinary_at) for case in rest) if case.wrong_at]
        mistakes += of_some_inputs(subject, others, results) if others and not mistakes else []
        for dtype in (dtype for dtype in DTYPES if dtype in ordinary_at):
            mistakes += of_outputs(subject, dtype, rest, results)
    for case in results:
        if case.raised_at and not (mistakes and case.group in ("gradients", "compile")):
            return [*mistakes, (next(iter(case.raised_at.values())), {*case.raised_at})]
    return mistakes or [(f"{UNKNOWN}: the first case that fails is {str(rest[0])[5:]}", set())]


def of_cases(sentence: str, cases: Results) -> tuple[str, set[str]]:
    """Return a mistake that these cases show, with the place that is wrong in their tensors."""
    place = next((case.worst.place for case in reversed(cases) if case.worst.place), "")
    return f"{sentence} ({place})" if place else sentence, wrong_at(cases)


def wrong_at(cases: Results) -> set[str]:
    """Return the names of the dtypes at which some of these cases have wrong numbers."""
    return set[str]().union(*(case.wrong_at for case in cases))


def of_some_inputs(subject: Subject, failed: Results, results: Results) -> Mistakes:
    """Return what is wrong with a norm whose ordinary rows are right: gradients, a formula, or some inputs."""
    values = [case for case in failed if case.group not in ("gradients", "compile")]
    if not values and (mistakes := of_gradients(subject, failed, results)):
        return mistakes
    at = wrong_at(failed)
    with contextlib.suppress(*RAISED):
        if sentences := agreed(subject, _first(at)):
            return [(sentence, at) for sentence in sentences]
    failed = values or failed
    kinds = {case.name for case in failed} & {kind.name for kind in ROW_KINDS}
    for table in SYMPTOMS[len(kinds) > 1 :]:  # a mean far from 0 alone has a name
        mistakes = of_numbers(failed, results) if table is INPUTS else []
        for pattern, sentence in table.items():
            matches = {match: case for case in failed if (match := re.fullmatch(pattern, case.name))}
            items = ", ".join("".join(match.groups()) for match in matches)
            mistakes += [of_cases(sentence.format(items), [*matches.values()])] if matches else []
        if mistakes:
            return mistakes[:MOST]
    return []


def _first(dtypes: set[str]) -> torch.dtype:
    return next(dtype for name, dtype in DTYPES.items() if name in dtypes)


def of_numbers(failed: Results, results: Results, *, before: str = "", least: float = 0.0) -> Mistakes:
    """Return at which widths and sizes a norm is wrong.

    Args:
        before: how the names of the cases begin: "gradients, ".
        least: the share of numbers that must be right, so that it is no accident.
    """
    mistakes: Mistakes = []
    for pattern, noun in NUMBERS.items():
        wrong, every = (
            {match[1]: case for case in cases if (match := re.fullmatch(before + pattern, case.name))}
            for cases in (failed, results)
        )
        if wrong and len(every) - len(wrong) >= least * len(every):
            more = f" and {len(wrong) - FEW} more of {len(every)}" if len(wrong) > FEW else ""
            mistakes.append(of_cases(f"wrong only at {noun} {', '.join([*wrong][:FEW])}{more}", [*wrong.values()]))
    return mistakes


# --- Outputs ---


def of_outputs(subject: Subject, name: str, failed: Results, results: Results) -> Mistakes:
    """Return what is wrong with a norm whose ordinary rows are wrong at the dtype of this name."""
    dtype, subject = DTYPES[name], subject.drawing_for("diagnosis")
    at = {name} if name != "float32" else set[str]()
    here = [case for case in failed if name in case.wrong_at]
    shown = [case for case in here if case.name == ORDINARY.name]
    worst, sentences = shown[0].worst, list[str]()
    with contextlib.suppress(*RAISED):
        sentences = agreed(subject, dtype) or precision(subject, dtype)
        if not sentences and worst.place and worst.ratio > FAR:
            return [of_cases("some rows or columns are wrong", shown)]
        sentences = sentences or structure(subject, dtype)
        if not sentences and (some := _of_ranks_and_sizes(here, [case for case in results if name in case.dtypes])):
            return some
        sentences = sentences or symptoms(subject, dtype)
    if not sentences:
        place = f", {worst.place}" if worst.place else ""
        sentences = [f"{UNKNOWN}: its values are off by {worst.error:.2g}, {worst.note}{place}"]
    return [(sentence, at) for sentence in sentences]


def _of_ranks_and_sizes(failed: Results, results: Results) -> Mistakes:
    """Return at which widths, sizes or ranks a norm is wrong, if it is right at a quarter of them at least."""
    ranks, judged = ([case for case in cases if re.fullmatch(".-D input", case.name)] for cases in (failed, results))
    names = ", ".join(case.name.removesuffix(" input") for case in ranks)
    some = [of_cases(f"wrong only for {names} input", ranks)] if 0 < len(ranks) < len(judged) else []
    return [*some, *of_numbers(failed, results, least=0.25)]


def agreed(subject: Subject, dtype: torch.dtype) -> list[str]:
    """Return the mistakes of the formula of the outputs."""
    return of_probes({probe: closest_formula(subject, dtype, shape) for probe, shape in PROBES.items()})


def of_probes(by_probe: Mapping[str, list[str] | None]) -> list[str]:
    """Return the mistakes that explain every probe but those that are right; none if a probe is unexplained."""
    wrong = {probe: mistakes for probe, mistakes in by_probe.items() if mistakes != []}
    first = next(iter(wrong.values()), None)
    if not first or any(mistakes != first for mistakes in wrong.values()):
        return []
    where = f", at {' and '.join(wrong)} only" if len(wrong) < len(by_probe) else ""
    return [f"{mistake}{where}" for mistake in first]


@torch.no_grad()
def ask(
    subject: Subject, x: Tensor, scale: float | Tensor = 1.0, shift: float | Tensor = 0.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """Return the norm of ``x`` (..., C) in float64 on the CPU; scale and shift are numbers or (C,) tensors."""
    blank = torch.ones(x.shape[-1], dtype=torch.float64)
    norm = subject.candidate(x.shape[-1], dtype, weights=lambda width, generator: (blank * scale, blank * shift))
    return norm(subject.put(x, dtype).clone()).cpu().double()  # a clone: it may be written into


def closest_formula(subject: Subject, dtype: torch.dtype, shape: tuple[int, ...]) -> list[str] | None:
    """Return the mistakes of the formula that gives the norm's outputs best; None if none does."""
    deviation = torch.logspace(-6 if dtype not in HALVES else -4, 3, 24, dtype=torch.float64).view(*shape[:-1], 1)
    x = (deviation * (1 + normal(subject.generator, *shape))).to(dtype).double()
    scale, shift = ((1 + spread * normal(subject.generator, shape[-1])).to(dtype).double() for spread in (2, 1))
    y = ask(subject, x, scale, shift, dtype)
    x, y = (tensor.view(-1, *tensor.shape[-2:]) for tensor in (x, y))  # (B, T, C)
    limit = LIMIT + 2 * PRECISIONS[dtype].result
    choices = with_few(TABLES[subject.centers])
    return best(((names, distance(y, formula(x, scale, shift, parts))) for names, parts in choices), limit)


def with_few(tables: Sequence[Mapping[str, Any]], most: int = 2) -> list[tuple[list[str], list[Any]]]:
    """Return the choices of one part of each table with at most ``most`` mistakes, those with the fewest first."""
    choices = []
    for mistakes in range(most + 1):
        for wrong in itertools.combinations(range(len(tables)), mistakes):
            parts = [[*table.items()][1:] if at in wrong else [("", table[""])] for at, table in enumerate(tables)]
            for choice in itertools.product(*parts):
                choices.append(([name for name, _ in choice if name], [part for _, part in choice]))
    return choices


def best(formulas: Iterable[tuple[list[str], float]], limit: float) -> list[str] | None:
    """Return the mistakes of the first formula that is about as close as the closest; None if none is close."""
    formulas = list(formulas)
    closest = min((off for _, off in formulas if not math.isnan(off)), default=math.inf)
    near = (names for names, off in formulas if off <= max(3 * closest, 2e-6))
    return next(near) if closest <= limit else None


def precision(subject: Subject, dtype: torch.dtype) -> list[str]:
    """Return whether a norm computes in too few bits.

    It does so if its rows are about right and all fit a narrower dtype, or are off by some roundings in half
    precision.
    """
    x = subject.put(ordinary(64, 64, subject.generator), dtype).cpu().double()
    y, u = ask(subject, x, dtype=dtype), PRECISIONS[dtype].result
    narrower = [other for other in PRECISIONS if PRECISIONS[other].result > u]
    is_narrow = any(torch.equal(y.to(other).double(), y) for other in narrower)
    allowed = 0.1 if is_narrow else 4 * u * (dtype in HALVES)
    is_right = distance(y, true_norm(x, subject.centers)) <= allowed
    return [f"it computes in too few bits for {dtype_name(dtype)} input"] * is_right


def structure(subject: Subject, dtype: torch.dtype) -> list[str]:
    """Return which values of a row, or which rows, a result is computed from, if not from its row."""
    x = normal(subject.generator, 8, 64)
    y, moved = ask(subject, x, dtype=dtype), x.clone()
    moved[:, 0] += 3
    if not y.isfinite().all():
        return ["it returns NaN or infinities for ordinary rows"]
    if not y.any():
        return ["it returns 0 for ordinary rows, without scale and shift"]
    changed = (ask(subject, moved, dtype=dtype) != y).any(0)  # (C,)
    group = int(changed.sum())
    if group < 64 and changed[:group].all():
        by_itself = "each value is computed by itself, without the statistics of its row"
        return [by_itself if group < 2 else f"each {group} of the 64 values of a row are normalized by themselves"]
    is_mixed = distance(torch.cat([ask(subject, row, dtype=dtype) for row in x.split(1)]), y) > 1e-3
    return ["a row depends on its batch"] * is_mixed


def symptoms(subject: Subject, dtype: torch.dtype) -> list[str]:
    """Return a property of the outputs of a norm that is wrong for all inputs, and that no formula explains."""
    x = normal(subject.generator, 8, 64)
    y = ask(subject, x, dtype=dtype)
    drift = (ask(subject, x + 2, dtype=dtype) - y).mean(-1)  # what is left of a mean moves all values to one side
    scaled = distance(ask(subject, x, 2.0, 3.0, dtype), 2 * y + 3)
    shows = {
        "the mean is not subtracted, or not whole: a shift of the row changes the result":
            subject.centers and drift.mean().abs() > max(1e-4, 2 * drift.std().item()),
        "it does not divide by the row's own deviation: four times the row gives another result":
            distance(ask(subject, 4 * x, dtype=dtype), y) > 0.05,
        "scale and shift are applied otherwise than in row * scale + shift":
            scaled > 1e-3 + 4 * PRECISIONS[dtype].result,
    }  # fmt: skip
    return [sentence for sentence, is_shown in shows.items() if is_shown][:1]


# --- Gradients ---


def of_gradients(subject: Subject, failed: Results, results: Results) -> Mistakes:
    """Return which gradients are wrong, and the formula that gives them, or where they are wrong."""
    cases = [case for case in failed if case.group == "gradients"]
    mistakes: Mistakes = []
    for part in sorted(set[str]().union(*(case.worst.parts for case in cases))):
        of_part = [case for case in cases if part in case.worst.parts]
        at, by_probe = wrong_at(of_part), dict[str, list[str] | None]()
        with contextlib.suppress(*RAISED):
            for probe, shape in BACKWARD_PROBES.items():
                by_probe[probe] = wrong_gradient(subject.drawing_for("gradients"), _first(at), shape, part)
        named = [(sentence, at) for sentence in of_probes(by_probe)] or [_where(of_part, results)]
        mistakes += [(f"the gradient of the {part} is wrong: {sentence}", at) for sentence, at in named]
    return mistakes


def _where(cases: Results, results: Results) -> tuple[str, set[str]]:
    """Return at which inputs a gradient is wrong, if others are right, and else by how much."""
    before = "gradients, "
    pruned = [case for case in cases if case.name == before + PRUNED.name]
    if pruned and not math.isfinite(pruned[0].worst.error or 0):
        return of_cases("it is not finite where the scale is 0", pruned)
    if some := of_numbers(cases, results, before=before, least=0.25):
        return some[0]
    if len(cases) <= FEW and len(cases) < sum(case.group == "gradients" for case in results):
        return of_cases(f"only for {', '.join(case.name.removeprefix(before) for case in cases)}", cases)
    worst = max((case.worst for case in cases), key=lambda outcome: outcome.ratio)
    return of_cases(f"{UNKNOWN}, it is off by {worst.error:.2g} where {worst.bound:.2g} is allowed", cases)


def wrong_gradient(subject: Subject, dtype: torch.dtype, shape: tuple[int, ...], part: str) -> list[str] | None:
    """Return the mistakes of a gradient at a probe; none if it is right, None if no mistake fits."""
    rows, width, centers = math.prod(shape[:-1]), shape[-1], subject.centers
    norm = subject.candidate(width, dtype)
    norm.module.train()
    spread = torch.logspace(-2, 1, rows, dtype=torch.float64)[:, None]
    x = subject.put(spread * ordinary(rows, width, subject.generator), dtype).view(shape)
    dy, limit = subject.rows(*shape, dtype=dtype), LIMIT + 2 * PRECISIONS[dtype].result
    value = gradients(norm, norm, x, dy.clone())[part].cpu().double()
    x_, dy_ = (tensor.detach().cpu().double().view(rows, width) for tensor in (x, dy))
    weight = norm.module.weight.detach().cpu().double()
    if part == "input":  # times the deviation, so that all rows count alike
        value = value.view(rows, width) * deviation_of(x_, centers)
        tables = BACKWARD[centers]
        true = slope([table[""] for table in tables], x_, dy_, weight, centers)
        formulas = ((names, slope(parts, x_, dy_, weight, centers)) for names, parts in with_few(tables))
    else:
        limit += PRECISIONS[dtype].result * math.sqrt(rows) / 4
        s = true_norm(x_, centers)
        true = SUMS[part][""](dy_, x_, s, weight).sum(0)
        formulas = (([name] * bool(name), terms(dy_, x_, s, weight).sum(0)) for name, terms in SUMS[part].items())
    named = best(((names, distance(value, expected)) for names, expected in formulas), limit)
    if named is not None:
        return named
    factor = ((value * true).sum() / true.square().sum()).item()
    if distance(value, factor * true) <= limit:
        is_mean = part != "input" and abs(rows * factor - 1) < 1e-2
        return ["it is the mean over the rows, not the sum" if is_mean else multiplied(factor)]
    if part != "input":
        return None
    alone = gradients(norm, norm, x.view(rows, width)[:1], dy.view(rows, width)[:1].clone())["input"]
    is_mixed = distance(alone.cpu().double() * deviation_of(x_, centers)[:1], value[:1]) > limit
    return ["that of a row depends on the other rows of the batch"] if is_mixed else None


def multiplied(factor: float) -> str:
    """Return the name of a constant factor."""
    signs = {0: "it is 0", -1: "it has the wrong sign"}
    return next((name for n, name in signs.items() if abs(factor - n) < 1e-3), f"it is multiplied by {digits(factor)}")


def distance(a: Tensor, b: Tensor) -> float:
    """Return RMS(a - b) / RMS(b)."""
    return ((a - b).square().mean().sqrt() / b.square().mean().sqrt().clamp(min=1e-300)).item()


def digits(factor: float) -> str:
    """Return a factor with the digits that tell it from 1."""
    return f"{factor:.3g}" if abs(factor - 1) > 0.01 else f"{factor:.6g}"
