"""From failed cases to the name of the mistake. Inputs and outputs say it; no source code is read.

A formula is named if it gives the norm's numbers at every probe: another rank, another width. If it gives them at some
probes, the diagnosis says at which. If nothing fits, it says which inputs are right, which are wrong, and by how much.
"""

import contextlib
import dataclasses
import enum
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from minigpt.conformance.case import CaseResult, Subject, pattern_of
from minigpt.conformance.cases import gradients
from minigpt.conformance.mistakes import (
    BACKWARD,
    CALLS,
    INPUTS,
    NUMBERS,
    SUMS,
    SYMPTOMS,
    TABLES,
    UNSTEADY,
    deviation_of,
    formula,
    slope,
    true_norm,
)
from minigpt.conformance.truth import ORDINARY, PRECISIONS, PRUNED, ROW_KINDS, normal, ordinary
from minigpt.device import DTYPES, HALVES, dtype_name
from minigpt.errors import RAISED


class Kind(enum.Enum):
    """What a diagnosis rests on."""

    UNSTEADY = "the same call has several results, so there is no formula"
    CALLS = "a call has an effect beside its result"
    FORMULA = "another formula gives the same numbers"
    PRECISION = "the formula is right, and rounding is not"
    SYMPTOM = "a property of the numbers"
    PATTERN = "which inputs are right, and which are wrong"
    ERROR = "the norm raises"


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """A sentence that names a mistake, and the names of the dtypes that show it; none if all do."""

    kind: Kind
    sentence: str
    dtypes: frozenset[str] = frozenset()

    def is_about(self, dtype: str) -> bool:
        """Return True if the mistake shows at ``dtype``."""
        return not self.dtypes or dtype in self.dtypes

    def __str__(self) -> str:
        return self.sentence


FEW, MOST = 6, 3  # items that are listed, and patterns
FAR = 100  # times the bound is no accident
LIMIT = 1e-4  # a formula explains a norm's outputs to this relative accuracy
UNKNOWN = "no known mistake fits"
ONE_ROUNDING = 0.58  # RMS of one rounding's error over u, for errors spread evenly: 1 / sqrt(3)
PROBES = {"3-D input": (4, 6, 64), "2-D input": (24, 64), "width 192": (24, 192)}
BACKWARD_PROBES = PROBES | {"600 rows": (600, 768)}


# --- From the cases to the diagnoses ---

Results = Sequence[CaseResult]
Located = list[tuple[str, Results]]  # a sentence, and the cases that show it


def diagnoses(subject: Subject, results: Results) -> list[Diagnosis]:
    """Return what is wrong with a norm that failed some of these cases, most important first; at least one."""
    wrong = {case.name: case for case in results if case.wrong_at}
    if unsteady := _of_names(UNSTEADY, wrong, results):
        return [dataclasses.replace(one, kind=Kind.UNSTEADY) for one in unsteady[:1]]
    mistakes = _of_names(CALLS, wrong, results)
    rest = [case for case in wrong.values() if case.name not in CALLS]
    ordinary_at = wrong[ORDINARY.name].wrong_at if ORDINARY.name in wrong else set[str]()
    if "float32" in ordinary_at:
        mistakes += of_outputs(subject, "float32", rest, results)
    else:
        others = [case for case in rest if case.wrong_at - ordinary_at]
        mistakes += of_some_inputs(subject, others, results, ordinary_at) if others and not mistakes else []
        for dtype in (dtype for dtype in DTYPES if dtype in ordinary_at):
            mistakes += of_outputs(subject, dtype, rest, results)
    raised = [case for case in results if case.raised_at and not (mistakes and case.group in ("gradients", "compile"))]
    mistakes += [
        _diagnosis(Kind.ERROR, next(iter(case.raised_at.values())), case.raised_at, results) for case in raised[:1]
    ]
    return mistakes or [Diagnosis(Kind.PATTERN, f"{UNKNOWN}: the first case that fails is {str(rest[0])[5:]}")]


def of_some_inputs(subject: Subject, failed: Results, results: Results, explained: Iterable[str]) -> list[Diagnosis]:
    """Return what is wrong with a norm whose ordinary rows are right: gradients, a formula, or some inputs.

    Args:
        explained: dtypes that other diagnoses are about.
    """
    values = [case for case in failed if case.group not in ("gradients", "compile")]
    if not values and (mistakes := of_gradients(subject, failed, results, explained)):
        return mistakes
    at = set[str]().union(*(case.wrong_at for case in failed)) - {*explained}
    dtype = DTYPES[next(dtype for dtype in DTYPES if dtype in at)]
    with contextlib.suppress(*RAISED):
        if sentences := agreed(subject, dtype):
            return [_diagnosis(Kind.FORMULA, sentence, at, results) for sentence in sentences]
    return [_of_cases(*one, results, explained) for one in patterns(values or failed, results)]


def _of_names(table: Mapping[str, str], wrong: Mapping[str, CaseResult], results: Results) -> list[Diagnosis]:
    names = [name for name in table if name in wrong]
    return [_diagnosis(Kind.CALLS, table[name], wrong[name].wrong_at, results) for name in names]


def _of_cases(sentence: str, cases: Results, results: Results, explained: Iterable[str] = ()) -> Diagnosis:
    """Return a diagnosis that these cases show, with the place that is wrong in their tensors."""
    place = next((case.worst.place for case in reversed(cases) if case.worst.place), "")
    dtypes = set[str]().union(*(case.wrong_at for case in cases)) - {*explained}
    return _diagnosis(Kind.PATTERN, f"{sentence} ({place})" if place else sentence, dtypes, results)


def _diagnosis(kind: Kind, sentence: str, dtypes: Iterable[str], results: Results) -> Diagnosis:
    """Return a diagnosis. Its sentence names the dtypes if the norm was judged at others too."""
    dtypes = frozenset(dtypes)
    if not dtypes or dtypes == set[str]().union(*(case.dtypes for case in results)):
        return Diagnosis(kind, sentence)
    names = sorted(dtypes)
    at = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    is_told = kind is Kind.ERROR or at in sentence
    return Diagnosis(kind, sentence if is_told else f"{sentence}, at {at}", dtypes)


def patterns(failed: Results, results: Results) -> Located:
    """Return which inputs are wrong, by the first table of ``SYMPTOMS`` that has some of these cases."""
    kinds = {case.name for case in failed} & {kind.name for kind in ROW_KINDS}
    for table in SYMPTOMS[len(kinds) > 1 :]:  # a mean far from 0 alone has a name
        located = of_numbers(failed, results) if table is INPUTS else []
        for pattern, sentence in table.items():
            before, _, after = pattern.partition("*")
            cases = [case for case in failed if fnmatchcase(case.name, pattern)]
            items = (case.name.removeprefix(before).removesuffix(after) for case in cases)
            located += [(sentence.format(", ".join(items)), cases)] if cases else []
        if located:
            return located[:MOST]
    return []


def of_numbers(failed: Results, results: Results, *, prefix: str = "", least: float = 0.0) -> Located:
    """Return at which widths and sizes a norm is wrong, and a rule for them.

    Args:
        prefix: of the names of the cases: "gradients, ".
        least: the share of numbers that must be right, so that the rule is no accident.
    """
    located: Located = []
    for pattern, noun in NUMBERS.items():
        wrong, every = (_by_number(prefix, pattern, cases) for cases in (failed, results))
        right = every.keys() - wrong.keys()
        if wrong and len(right) >= least * len(every):
            rule = rule_of(sorted(wrong), sorted(right))
            located += [(f"wrong only at {noun} {rule}", [*wrong.values()])] if rule else []
    return located


def _by_number(prefix: str, pattern: str, cases: Iterable[CaseResult]) -> dict[int, CaseResult]:
    before, after = pattern.replace("[0-9]", "").split("*")
    return {
        int(case.name.removeprefix(prefix + before).removesuffix(after).replace(",", "")): case
        for case in cases
        if fnmatchcase(case.name, prefix + pattern)
    }


def rule_of(wrong: Sequence[int], right: Sequence[int]) -> str:
    """Return a rule that tells the wrong numbers from the right ones; else the few that are wrong, or ""."""
    if not right:
        return _listed(wrong) if len(wrong) <= FEW else ""
    if wrong[0] > right[-1]:
        return f"from {wrong[0]:,} on, right to {right[-1]:,}"
    if wrong[-1] < right[0]:
        return f"to {wrong[-1]:,}, right from {right[0]:,} on"
    rules: dict[str, Callable[[int], bool]] = {"that are no power of two": lambda n: n.bit_count() > 1}
    for k in (2**power for power in range(10, 0, -1)):
        rules[f"that are no multiple of {k}"] = lambda n, k=k: n % k > 0
        rules[f"that are multiples of {k}"] = lambda n, k=k: n % k == 0
    exceptions = {  # where the error may be too small to be seen
        rule: [n for n in right if holds(n)] for rule, holds in rules.items() if all(map(holds, wrong))
    }
    rule = min(exceptions, key=lambda rule: len(exceptions[rule]), default="")
    if rule and min(len(wrong), len(right)) > 3 and len(exceptions[rule]) <= len(right) / 8:
        return rule + f", but right at {_listed(exceptions[rule])}" * bool(exceptions[rule])
    return _listed(wrong) if len(wrong) <= FEW else ""


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(f"{n:,}" for n in numbers)


# --- Outputs ---


def of_outputs(subject: Subject, name: str, failed: Results, results: Results) -> list[Diagnosis]:
    """Return what is wrong with a norm whose ordinary rows are wrong at the dtype of this name."""
    dtype, subject = DTYPES[name], subject.drawing_for("diagnosis")
    here = [case for case in failed if name in case.wrong_at]
    at = {name} if name != "float32" else set[str]()
    shown = [case for case in here if case.name == ORDINARY.name]
    worst, kind, sentences = shown[0].worst, Kind.FORMULA, list[str]()
    with contextlib.suppress(*RAISED):
        sentences = agreed(subject, dtype)
        if not sentences:
            kind, sentences = Kind.PRECISION, precision(subject, dtype)
        if not sentences and worst.place and worst.ratio > FAR:
            return [_of_cases("some rows or columns are wrong", shown, results)]
        if not sentences:
            kind, sentences = Kind.SYMPTOM, structure(subject, dtype)
        if not sentences and (some := _of_some_inputs(here, [case for case in results if name in case.dtypes])):
            return [_of_cases(*one, results) for one in some]
        if not sentences:
            kind, sentences = Kind.SYMPTOM, symptoms(subject, dtype)
    if not sentences:
        place = f", {worst.place}" if worst.place else ""
        kind, sentences = Kind.PATTERN, [f"{UNKNOWN}: its values are off by {worst.error:.2g}, {worst.note}{place}"]
    return [_diagnosis(kind, sentence, at, results) for sentence in sentences]


def _of_some_inputs(failed: Results, results: Results) -> Located:
    """Return at which widths, sizes or ranks a norm is wrong, if it is right at a quarter of them at least."""
    ranks, judged = ([case for case in cases if fnmatchcase(case.name, "?-D input")] for cases in (failed, results))
    names = ", ".join(case.name.removesuffix(" input") for case in ranks)
    some = [(f"wrong only for {names} input", ranks)] if 0 < len(ranks) < len(judged) else []
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
    weights = blank * scale, blank * shift
    norm = subject.candidate(x.shape[-1], dtype, weights=lambda width, generator: weights)
    return norm(subject.put(x, dtype).clone()).cpu().double()  # a clone: it may be written into


def closest_formula(subject: Subject, dtype: torch.dtype, shape: tuple[int, ...]) -> list[str] | None:
    """Return the mistakes of the formula that gives the norm's outputs best; None if none does."""
    deviation = torch.logspace(-6 if dtype not in HALVES else -4, 3, 24, dtype=torch.float64).view(*shape[:-1], 1)
    x = (deviation * (1 + normal(subject.generator, *shape))).to(dtype).double()
    scale, shift = ((1 + spread * normal(subject.generator, shape[-1])).to(dtype).double() for spread in (2, 1))
    y = ask(subject, x, scale, shift, dtype)
    x, y = (tensor.view(-1, *tensor.shape[-2:]) for tensor in (x, y))  # (B, T, C)
    limit = LIMIT + 2 * PRECISIONS[dtype].result
    return best(((names, distance(y, formula(x, scale, shift, parts))) for names, parts in with_few(TABLES, 2)), limit)


def with_few(tables: Sequence[Mapping[str, Any]], most: int) -> list[tuple[list[str], list[Any]]]:
    """Return the choices of one part of each table with at most ``most`` mistakes, those with the fewest first."""
    chosen = []
    for mistakes in range(most + 1):
        for wrong in itertools.combinations(range(len(tables)), mistakes):
            parts = [[*table.items()][1:] if at in wrong else [("", table[""])] for at, table in enumerate(tables)]
            chosen += [([name for name, _ in pick if name], [part for _, part in pick])
                       for pick in itertools.product(*parts)]  # fmt: skip
    return chosen


def best(formulas: Iterable[tuple[list[str], float]], limit: float) -> list[str] | None:
    """Return the mistakes of the first formula that is about as close as the closest; None if none is close."""
    formulas = list(formulas)
    closest = min((off for _, off in formulas if not math.isnan(off)), default=math.inf)
    near = (names for names, off in formulas if off <= max(3 * closest, 2e-6))
    return next(near) if closest <= limit else None


def precision(subject: Subject, dtype: torch.dtype) -> list[str]:
    """Return how a norm rounds, if its rows are LayerNorm's but for their length or for rounding."""
    x = subject.put(ordinary(64, 64, subject.generator), dtype).cpu().double()
    y, true, u, name = ask(subject, x, dtype=dtype), true_norm(x), PRECISIONS[dtype].result, dtype_name(dtype)
    length = ((y * true).sum() / true.square().sum()).item()
    if abs(length - 1) > max(1e-5, u) and distance(y, length * true) <= LIMIT / 50 + u:
        return [f"rows are {digits(length)} times as long as they should be"]
    for narrow in (torch.bfloat16, torch.float16, torch.float32):
        if PRECISIONS[narrow].result > u and torch.equal(y.to(narrow).double(), y):
            return [f"it computes in {dtype_name(narrow)} for {name} input"]
    if dtype not in HALVES or distance(y, true) > 16 * u:
        return []
    if shift_rounding(subject, dtype) >= u / 8:
        return [f"statistics are kept in {name} for {name} input"]
    return [f"its result is rounded more than once, or in another way, for {name} input"]


def shift_rounding(subject: Subject, dtype: torch.dtype, shift: float = 64.0) -> float:
    """Return how much a shift of the row changes the result, relative to the shift.

    LayerNorm does not change. Only its rounding does, which shows in how many bits a norm computes.
    """
    x = (2 * normal(subject.generator, 16, 64)).round() / 2  # exact at every dtype, also beside the shift
    off = distance(ask(subject, x + shift, dtype=dtype), ask(subject, x, dtype=dtype))
    return 0.0 if off > 1 else off / shift / ONE_ROUNDING  # more is not rounding: the mean is not subtracted


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
        by_itself = "each value is computed by itself, without the mean and the deviation of its row"
        return [by_itself if group < 2 else f"each {group} of the 64 values of a row are normalized by themselves"]
    is_mixed = distance(torch.cat([ask(subject, row, dtype=dtype) for row in x.split(1)]), y) > 1e-3
    return ["a row depends on its batch"] * is_mixed


def symptoms(subject: Subject, dtype: torch.dtype) -> list[str]:
    """Return properties of the outputs of a norm that is wrong for all inputs, and that no formula explains."""
    x = normal(subject.generator, 8, 64)
    y = ask(subject, x, dtype=dtype)
    drift = (ask(subject, x + 2, dtype=dtype) - y).mean(-1)  # what is left of a mean moves all values to one side
    if drift.mean().abs() > max(1e-4, 2 * drift.std().item()):
        return ["the mean is not subtracted, or not whole: a shift of the row changes the result"]
    if distance(ask(subject, 4 * x, dtype=dtype), y) > 0.05:
        return ["it does not divide by the row's own deviation: four times the row gives another result"]
    if dtype == torch.float32 and shift_rounding(subject, dtype) >= 2**-14:  # one rounding leaves 2^-11 in float16
        return ["statistics are kept in half precision, or in as few bits"]
    is_affine = distance(ask(subject, x, 2.0, 3.0, dtype), 2 * y + 3) <= 1e-3 + 4 * PRECISIONS[dtype].result
    return ["scale and shift are applied otherwise than in row * scale + shift"] * (not is_affine)


# --- Gradients ---


def of_gradients(subject: Subject, failed: Results, results: Results, explained: Iterable[str]) -> list[Diagnosis]:
    """Return which gradients are wrong, and the formula that gives them, or where they are wrong."""
    cases = [case for case in failed if case.group == "gradients"]
    mistakes = []
    for part in sorted(set[str]().union(*(case.worst.parts for case in cases))):
        of_part = [case for case in cases if part in case.worst.parts]
        at = set[str]().union(*(case.wrong_at for case in of_part)) - {*explained}
        dtype, by_probe = next(dtype for name, dtype in DTYPES.items() if name in at), dict[str, list[str] | None]()
        with contextlib.suppress(*RAISED):
            for probe, shape in BACKWARD_PROBES.items():
                by_probe[probe] = wrong_gradient(subject.drawing_for("gradients"), dtype, shape, part)
        sentences = of_probes(by_probe)
        begin = f"the gradient of the {part} is wrong"
        mistakes += [_diagnosis(Kind.FORMULA, f"{begin}: {sentence}", at, results) for sentence in sentences]
        if not sentences:
            sentence, some = _where(of_part, results)
            mistakes.append(_of_cases(f"{begin}: {sentence}", some, results, explained))
    return mistakes


def _where(cases: Results, results: Results) -> tuple[str, Results]:
    """Return at which inputs a gradient is wrong, if there are few or a rule, and else by how much."""
    names = [case.name.removeprefix("gradients, ") for case in cases]
    if (at_0 := f"gradients, {PRUNED.name}") and any(
        case.name == at_0 and not math.isfinite(case.worst.error or 0) for case in cases
    ):
        return "it is not finite where the scale is 0", [case for case in cases if case.name == at_0]
    if some := of_numbers(cases, results, prefix="gradients, ", least=0.25):
        return some[0]
    judged = [case for case in results if case.group == "gradients"]
    if len(names) <= FEW and len(names) < len(judged):
        return f"only for {', '.join(names)}", cases
    worst = max((case.worst for case in cases), key=lambda outcome: outcome.ratio)
    return f"{UNKNOWN}, it is off by {worst.error:.2g} where {worst.bound:.2g} is allowed", cases


def wrong_gradient(subject: Subject, dtype: torch.dtype, shape: tuple[int, ...], part: str) -> list[str] | None:
    """Return the mistakes of a gradient at a probe; none if it is right, None if no mistake fits."""
    rows, width = math.prod(shape[:-1]), shape[-1]
    norm = subject.candidate(width, dtype)
    norm.module.train()
    spread = torch.logspace(-2, 1, rows, dtype=torch.float64)[:, None]
    x = subject.put(spread * ordinary(rows, width, subject.generator), dtype).view(shape)
    dy, limit = subject.rows(*shape, dtype=dtype), LIMIT + 2 * PRECISIONS[dtype].result
    value = gradients(norm, norm, x, dy.clone())[part].cpu().double()
    x_, dy_, weight = (
        tensor.detach().cpu().double() for tensor in (x.view(rows, width), dy.view(rows, width), norm.module.weight)
    )
    if part != "input":
        limit += PRECISIONS[dtype].result * math.sqrt(rows) / 4
        for name, terms in SUMS[part].items():
            if distance(value, terms(dy_, x_, weight).sum(0)) <= limit:
                return [name] if name else []
        return of_rows(value, SUMS[part][""](dy_, x_, weight), limit)
    value = value.view(rows, width) * deviation_of(x_)
    named = best(
        ((names, distance(value, slope(parts, x_, dy_, weight))) for names, parts in with_few(BACKWARD, 2)), limit
    )
    if named is None:
        true = slope([table[""] for table in BACKWARD], x_, dy_, weight)
        factor = ((value * true).sum() / true.square().sum()).item()
        alone = gradients(norm, norm, x.view(rows, width)[:1], dy.view(rows, width)[:1].clone())["input"]
        if distance(value, factor * true) <= limit:
            return [multiplied(factor)]
        if distance(alone.cpu().double() * deviation_of(x_)[:1], value[:1]) > limit:
            return ["that of a row depends on the other rows of the batch"]
    return named


def of_rows(total: Tensor, terms: Tensor, limit: float) -> list[str] | None:
    """Return how often each of fewer rows than columns counts in a sum of ``terms`` (rows, width), if not once."""
    whole = terms.sum(0)
    factor = ((total * whole).sum() / whole.square().sum()).item()
    if distance(total, factor * whole) <= limit:
        is_mean = abs(len(terms) * factor - 1) < 1e-2
        return ["it is the mean over the rows, not the sum" if is_mean else multiplied(factor)]
    counts = torch.linalg.lstsq(terms.T, total[:, None]).solution.flatten()
    if distance(total, counts @ terms) > limit:
        return None
    wrong = (counts - 1).abs() > max(1e-2, 4 * limit)
    place = "the last row" if wrong[-1] and wrong.sum() == 1 else pattern_of("row", wrong)
    times = counts[wrong].mean().item()
    return (
        [f"{place} counts {digits(times)} times" if abs(times) > 1e-2 else f"{place} are left out"] if place else None
    )


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
