"""One question to a norm: what is measured, against which bound, and why that bound."""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from minigpt.conformance.conformance_report import CaseResult
from minigpt.conformance.subject import Candidate, Mismatch, Subject, Unsupported
from minigpt.errors import RAISED, NormError
from minigpt.norms.foreign.locate import last_line

EXACTLY = "the same numbers: there is nothing to round"


class Measurement(NamedTuple):
    """An error and the most it may be. NaN is never within a bound."""

    error: float
    bound: float
    reference_error: float | None = None
    note: str = ""

    @property
    def within(self) -> bool:
        return self.error <= self.bound

    @property
    def ratio(self) -> float:
        """Error over bound; infinite for NaN, and for any error where none is allowed."""
        if math.isnan(self.error):
            return math.inf
        return self.error / self.bound if self.bound else math.inf if self.error else 0.0


Measure = Callable[[Subject], Measurement]


@dataclasses.dataclass(frozen=True)
class Case:
    """A question, and how to measure the answer."""

    name: str
    group: str
    tests: str
    reason: str  # for the bound
    measure: Measure

    def run(self, subject: Subject) -> CaseResult:
        """Ask it. A norm that raises has failed the case; one that says it does not do this has not been judged."""
        try:
            found = self.measure(subject.drawing_for(self.name))
        except Unsupported as refusal:
            return self._result(None, passed=True, note=f"not judged: {refusal}")
        except (Mismatch, NormError) as error:
            return self._result(None, passed=False, note=str(error))
        except RAISED as error:
            return self._result(None, passed=False, note=f"it raises {last_line(error)}")
        return self._result(found, passed=found.within, note=found.note)

    def _result(self, found: Measurement | None, *, passed: bool, note: str) -> CaseResult:
        return CaseResult(
            name=self.name,
            group=self.group,
            tests=self.tests,
            error=found.error if found else None,
            bound=found.bound if found else None,
            reference_error=found.reference_error if found else None,
            reason=self.reason,
            passed=passed,
            note=note,
        )


def case(name: str, group: str, *, tests: str, reason: str) -> Callable[[Measure], Case]:
    """Decorator: the function measures the answer to this question."""
    return lambda measure: Case(name, group, tests, reason, measure)


def against_truth(candidate: Candidate, x: Tensor, y: Tensor | None = None) -> Measurement:
    """The norm of ``x`` (or ``y``, which claims to be it) against float64, and PyTorch's own layer_norm likewise."""
    with torch.no_grad():
        values, bound = candidate.truth(x)  # before the norm, which may write into its input
        reference = worst_element(candidate.reference(x), values, bound)
        y = candidate(x) if y is None else y
    return worst_element(y, values, bound)._replace(reference_error=reference.error)


def require_as_finite(y: Tensor, reference: Tensor, *, hiding: bool) -> None:
    """Each row of ``y`` is finite where that of ``reference`` is and, if ``hiding`` matters, only there.

    Raises:
        Mismatch: it is not so.
    """
    for found, true in zip(y, reference, strict=True):
        finite, truly_finite = bool(found.isfinite().all()), bool(true.isfinite().all())
        if truly_finite and not finite:
            raise Mismatch(f"it returns {found[~found.isfinite()][0].item()} where torch's layer_norm is finite")
        if hiding and finite and not truly_finite:
            raise Mismatch("it returns finite numbers where torch's layer_norm returns NaN, so it hides a NaN")


def worst_element(value: Tensor, expected: Tensor, bound: Tensor) -> Measurement:
    """Error and bound where the error is largest beside its bound; ``expected`` and ``bound`` float64 on the CPU."""
    if value.numel() == 0:
        return Measurement(0.0, 0.0)
    error = difference(value, expected)  # (...)
    ratio = torch.where(error == 0, 0.0, error / bound).nan_to_num(nan=math.inf, posinf=math.inf)
    worst = int(ratio.argmax())
    return Measurement(error.flatten()[worst].item(), bound.flatten()[worst].item())


def same_numbers(value: Tensor, expected: Tensor) -> Measurement:
    """The largest difference between two tensors that should not differ at all."""
    return worst_element(value, expected, torch.zeros_like(expected, dtype=torch.float64, device="cpu"))


def difference(a: Tensor, b: Tensor) -> Tensor:
    """|a - b| in float64 on the CPU; 0 between equal infinities and between NaNs, NaN between a NaN and a number."""
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    return torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())


def worst(measurements: dict[str, Measurement]) -> Measurement:
    """The one nearest to its bound or furthest beyond it, and its name as the note."""
    name = max(measurements, key=lambda key: measurements[key].ratio)
    found = measurements[name]
    if found.error == 0:
        return found
    return found._replace(note=f"worst at {name}" + (f"; {found.note}" if found.note else ""))
