"""From wrong gradients to the name of the mistake in a backward pass."""

import contextlib
import math
from typing import NamedTuple

import torch
from torch import Tensor

from minigpt.conformance.cases import gradients
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
from minigpt.conformance.probes import LIMIT, PROBES, best, distance, of_probes, with_few
from minigpt.conformance.subject import Built, Subject
from minigpt.conformance.truth import PRECISIONS, PRUNED, ordinary
from minigpt.norms.formulas import deviation, exact_norm

BACKWARD_PROBES = PROBES | {"600 rows": (600, 768)}
SIGNS = {0: "it is 0", -1: "it has the wrong sign"}


def of_gradients(subject: Subject, failed: Results, results: Results) -> Mistakes:
    """Return which gradients are wrong, and the formula that gives them, or where they are wrong."""
    cases = [case for case in failed if case.is_backward]
    parts = set[str]()
    for case in cases:
        parts |= case.worst_measured.parts
    mistakes: Mistakes = []
    for part in sorted(parts):
        of_part = [case for case in cases if part in case.worst_measured.parts]
        at = wrong_at(of_part)
        sentences = _formulas(subject, first_dtype(at), part)
        if not sentences:
            sentence, at = _where(of_part, results)
            sentences = [sentence]
        for sentence in sentences:
            mistakes.append((f"the gradient of the {part} is wrong: {sentence}", at))
    return mistakes


def _formulas(subject: Subject, dtype: torch.dtype, part: str) -> list[str]:
    """Return the mistakes of the formula that gives a gradient at every probe; none if no formula does."""
    by_probe: dict[str, list[str] | None] = {}
    with contextlib.suppress(Exception):
        for probe, shape in BACKWARD_PROBES.items():
            by_probe[probe] = wrong_gradient(subject.drawing_for("gradients"), dtype, shape, part)
    return of_probes(by_probe)


def _where(cases: Results, results: Results) -> FoundMistake:
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


def probe_of(subject: Subject, dtype: torch.dtype, shape: tuple[int, ...]) -> Probe:
    """Return a probe of rows whose deviations spread over three powers of ten."""
    rows, width = math.prod(shape[:-1]), shape[-1]
    norm = subject.candidate(width, dtype)
    norm.module.train()
    spread = torch.logspace(-2, 1, rows, dtype=torch.float64)[:, None]
    x = subject.put(spread * ordinary(rows, width, subject.generator), dtype).view(shape)
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
