"""From wrong gradients to the name of the mistake in a backward pass."""

import contextlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minigpt.conformance.cases import PyTorchInFloat32, gradients
from minigpt.conformance.compare import distance
from minigpt.conformance.found import (
    MOST_LISTED,
    UNKNOWN,
    FoundMistake,
    Mistakes,
    Results,
    first_dtype,
    of_cases,
    of_numbers,
    wrong_at,
)
from minigpt.conformance.mistakes import BACKWARD, SUMS, slope
from minigpt.conformance.probes import LIMIT, PROBES, best, of_probes, with_few
from minigpt.conformance.subject import Built, Subject
from minigpt.conformance.truth import PRECISIONS, PRUNED, ordinary
from minigpt.norms.formulas import deviation, exact_norm
from minigpt.precision import DTYPES, HALVES, dtype_name

PIECES = 64  # of the rows of a probe
BACKWARD_PROBES = PROBES | {"600 rows": (600, 768)}
SIGNS = {0: "it is 0", -1: "it has the wrong sign"}


def mistakes_of_gradients(subject: Subject, failed: Results, results: Results) -> Mistakes:
    """Return which gradients are wrong, and the formula that gives them, or where they are wrong."""
    cases = [case for case in failed if case.is_backward]
    parts = set[str]()
    for case in cases:
        parts |= case.worst_measured.parts
    mistakes: Mistakes = []
    for part in sorted(parts):
        of_part = [case for case in cases if part in case.worst_measured.parts]
        at = wrong_at(of_part)
        with PyTorchInFloat32():  # as the cases were judged
            sentences = [(sentence, at) for sentence in _formulas(subject, first_dtype(at), part)]
            sentences = sentences or _roundings(subject, at, part)
        sentences = sentences or [_where_wrong(of_part, results)]
        for sentence, shown_at in sentences:
            mistakes.append((f"the gradient of the {part} is wrong: {sentence}", shown_at))
    return mistakes


def _formulas(subject: Subject, dtype: torch.dtype, part: str) -> list[str]:
    """Return the mistakes of the formula that gives a gradient at every probe; none if no formula does."""
    by_probe: dict[str, list[str] | None] = {}
    with contextlib.suppress(Exception):
        for probe, shape in BACKWARD_PROBES.items():
            by_probe[probe] = wrong_gradient(subject.drawing_for("gradients"), dtype, shape, part)
    return of_probes(by_probe)


def _roundings(subject: Subject, at: set[str], part: str) -> Mistakes:
    """Return which step is rounded to half precision: of a wide dtype, or of each half precision by itself."""
    first = first_dtype(at)
    dtypes = [first]
    if first in HALVES:
        dtypes = [dtype for name, dtype in DTYPES.items() if name in at]
    found: dict[str, set[str]] = {}
    with contextlib.suppress(Exception):
        for dtype in dtypes:
            drawing = subject.drawing_for("roundings of gradients")
            sentence = rounded_step(drawing, dtype, part) or rounded_sum(drawing, dtype, part)
            if sentence and first in HALVES:
                found.setdefault(sentence, set()).add(dtype_name(dtype))
            elif sentence:
                found[sentence] = at
    return [*found.items()]


def _where_wrong(cases: Results, results: Results) -> FoundMistake:
    """Return at which inputs a gradient is wrong, if others are right, and else by how much."""
    every = [case for case in results if case.is_backward]
    pruned = [case for case in cases if case.value == PRUNED.name]
    if pruned and not math.isfinite(pruned[0].worst_measured.error or 0):
        return of_cases("it is not finite where the scale is 0", pruned)
    some = of_numbers(cases, every, least=0.25)
    if some:
        return some[0]
    if len(cases) <= MOST_LISTED and len(cases) < len(every):
        inputs = ", ".join(case.axis.named(case.value) for case in cases)
        return of_cases(f"only for {inputs}", cases)
    worst = max((case.worst_measured for case in cases), key=lambda outcome: outcome.ratio)
    return of_cases(f"{UNKNOWN}, it is off by {worst.error:.2g} where {worst.bound:.2g} is allowed", cases)


class Probe(NamedTuple):
    """A norm in training, rows and an incoming gradient, and the same numbers in float64 on the CPU."""

    norm: Built
    x: Tensor  # (*shape, width)
    dy: Tensor
    rows: Tensor  # (rows, width)
    incoming: Tensor
    weight: Tensor  # (width,)
    deviation: Tensor  # (rows, 1)
    kind: str

    def gradient(self, part: str) -> Tensor:
        """Return the norm's gradient of a part in float64; that of the input times the deviation."""
        value = gradients(self.norm, self.norm, self.x, self.dy.clone())[part].cpu().double()
        if part == "input":  # so that all rows count alike
            return value.view(self.rows.shape) * self.deviation
        return value

    def first_row_alone(self) -> Tensor:
        """Return the gradient of the first row in a batch of its own, times the deviation."""
        x = self.x.view(self.rows.shape)[:1].clone()
        dy = self.dy.view(self.rows.shape)[:1].clone()
        alone = gradients(self.norm, self.norm, x, dy)["input"]
        return alone.cpu().double() * self.deviation[:1]

    def formulas(self, part: str) -> list[tuple[list[str], Tensor]]:
        """Return the names of mistakes, and the gradient that a norm with these has; the right one first."""
        formulas = []
        if part == "input":
            for names, parts in with_few(BACKWARD[self.kind]):
                value = slope(parts, self.rows, self.incoming, self.weight, self.kind)
                formulas.append((names, value))
            return formulas
        s = exact_norm(self.rows, self.kind)
        for name, terms in SUMS[part].items():
            value = terms(self.incoming, self.rows, s, self.weight).sum(0)
            names = [name] if name else []
            formulas.append((names, value))
        return formulas


def probe_of(subject: Subject, dtype: torch.dtype, shape: tuple[int, ...], mean: float = 0.0) -> Probe:
    """Return a probe of rows whose deviations spread over three powers of ten, with means about ``mean`` of these."""
    rows, width = math.prod(shape[:-1]), shape[-1]
    norm = subject.candidate(width, dtype)
    norm.module.train()
    spread = torch.logspace(-2, 1, rows, dtype=torch.float64)[:, None]
    x = subject.put(spread * (mean + ordinary(rows, width, subject.generator)), dtype).view(shape)
    dy = subject.rows(*shape, dtype=dtype)
    wide_x = x.detach().cpu().double().view(rows, width)
    wide_dy = dy.detach().cpu().double().view(rows, width)
    weight = norm.module.weight.detach().cpu().double()
    divisor = deviation(wide_x, subject.kind)
    return Probe(norm, x, dy, wide_x, wide_dy, weight, divisor, subject.kind)


def wrong_gradient(subject: Subject, dtype: torch.dtype, shape: tuple[int, ...], part: str) -> list[str] | None:
    """Return the mistakes of a gradient at a probe; none if it is right, None if no mistake fits."""
    probe = probe_of(subject, dtype, shape)
    value, formulas = probe.gradient(part), probe.formulas(part)
    u, rows = PRECISIONS[dtype].result, len(probe.rows)
    limit = LIMIT + 2 * u
    if part != "input":
        limit += u * math.sqrt(rows) / 4
    distances = [(names, distance(value, expected)) for names, expected in formulas]
    named = best(distances, limit)
    if named is not None:
        return named
    _, true = formulas[0]
    factor = ((value * true).sum() / true.square().sum()).item()
    if distance(value, factor * true) <= limit:
        is_mean = part != "input" and abs(rows * factor - 1) < 1e-2
        if is_mean:
            return ["it is the mean over the rows, not the sum"]
        return [name_of_factor(factor)]
    if part == "input" and distance(probe.first_row_alone(), value[:1]) > limit:
        return ["that of a row depends on the other rows of the batch"]
    return None


def rounded_step(subject: Subject, dtype: torch.dtype, part: str) -> str:
    """Return the steps of a backward pass whose rounding to half precision gives a gradient; "" if none does."""
    if part == "bias":
        return ""
    probe = probe_of(subject, dtype, (24, 768), mean=30)
    value, x, g = probe.gradient(part), probe.rows, probe.incoming * probe.weight
    center = x.mean(-1, keepdim=True) if subject.centers else torch.zeros_like(x[:, :1])
    inverse = 1 / probe.deviation
    names = {"mean": "the mean", "inverse": "1 / deviation", "row": "the normalized row"}
    if not subject.centers:
        names["inverse"] = "1 / sqrt(mean square)"

    def off(steps: Sequence[str], last: Sequence[str], narrow: torch.dtype) -> float:
        """Return how far a gradient is off whose row has some steps rounded, and whose last product has others."""

        def rounded(step: str, value: Tensor, among: Sequence[str] = steps) -> Tensor:
            return value.to(narrow).double() if step in among else value

        s = rounded("row", (x - rounded("mean", center)) * rounded("inverse", inverse))
        if part == "weight":
            expected = (probe.incoming * s).sum(0)
        else:
            along = s * (g * s).mean(-1, keepdim=True)
            if subject.centers:
                along = along + g.mean(-1, keepdim=True)
            expected = (g - along) * rounded("inverse", inverse, last)
        if dtype in HALVES:
            expected = expected.to(dtype).double()
        if part == "input":
            expected = expected * probe.deviation
        return distance(value, expected)

    by_right = off((), (), dtype)
    offs: list[tuple[str, float]] = []
    for narrow in (dtype,) if dtype in HALVES else HALVES:
        for steps in ((), ("mean",), ("inverse",), ("row",), ("mean", "inverse"), ("mean", "row"), ("inverse", "row")):
            for last in ((), ("inverse",)):
                shown = [name for step, name in names.items() if step in (*steps, *last)]
                verb = "is" if len(shown) == 1 else "are"
                sentence = f"{' and '.join(shown)} {verb} rounded to {dtype_name(narrow)}"
                offs.append((sentence, off(steps, last, narrow)))
    closest = min(distance for _, distance in offs)
    if not closest < by_right / 2:
        return ""
    return next(sentence for sentence, distance in offs if distance <= 1.3 * closest)


def rounded_sum(subject: Subject, dtype: torch.dtype, part: str) -> str:
    """Return that a sum over rows is rounded, if the sums over few of them add up to a better one; else "".

    So no row is lost, and none is wrong.
    """
    if part == "input":
        return ""
    probe = probe_of(subject, dtype, (PIECES * 16, 64))
    terms = probe.incoming if part == "bias" else probe.incoming * exact_norm(probe.rows, probe.kind)
    whole, true = probe.gradient(part), terms.sum(0)
    pieces = torch.zeros_like(whole)
    for piece in range(PIECES):
        is_in = torch.arange(len(terms), device=probe.dy.device) % PIECES == piece
        pieces += probe._replace(dy=probe.dy * is_in[:, None]).gradient(part)
    off = distance(whole, true)
    if off <= max(3 * distance(pieces, true), 1.5 * PRECISIONS[dtype].result):
        return ""
    for narrow in HALVES:
        if torch.equal(whole.to(narrow).double(), whole):
            return f"the sum over the rows is rounded to {dtype_name(narrow)} as rows are added"
    return "the sum over the rows is rounded as rows are added"


def name_of_factor(factor: float) -> str:
    """Return the name of a constant factor."""
    for number, name in SIGNS.items():
        if abs(factor - number) < 1e-3:
            return name
    return f"it is multiplied by {factor_digits(factor)}"


def factor_digits(factor: float) -> str:
    """Return a factor with the digits in which it differs from 1."""
    if abs(factor - 1) > 0.01:
        return f"{factor:.3g}"
    return f"{factor:.6g}"
