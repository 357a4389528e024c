"""One question to a norm: what is measured, at which dtypes, against which bound, and what came out."""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from minigpt.conformance.subject import Candidate, Subject, Unsupported, described
from minigpt.errors import RAISED, NormError
from minigpt.measure.numerals import brief
from minigpt.placement import dtype_name

EXACTLY = "the numbers must be the same: nothing is rounded"


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """The answer to one question. The error is that of the element closest to its bound, or furthest beyond it."""

    name: str
    group: str
    tests: str
    error: float | None  # None if nothing was measured; the note says why
    bound: float | None
    reason: str  # for the bound
    passed: bool
    dtypes: dict[str, bool]  # whether it passed at each dtype; a dtype that was not judged is absent
    note: str = ""

    @property
    def raised(self) -> bool:
        """True if the norm failed and there is nothing to measure: it raised, or returned no such tensor."""
        return not self.passed and self.error is None

    @property
    def failed_at(self) -> set[str]:
        """The names of the dtypes at which it failed."""
        return {dtype for dtype, passed in self.dtypes.items() if not passed}

    def __str__(self) -> str:
        verdict = "pass" if self.passed else "FAIL"
        measured = "" if self.error is None else f": error {brief(self.error)}, bound {brief(self.bound)}"
        note = f" ({self.note})" if self.note else ""
        return f"{verdict} {self.name}{measured}{note}"


class Measurement(NamedTuple):
    """An error and the largest error allowed. NaN is never within a bound."""

    error: float
    bound: float
    note: str = ""

    @property
    def within(self) -> bool:
        return self.error <= self.bound

    @property
    def ratio(self) -> float:
        """Error over bound; infinite for NaN, and for any error if none is allowed."""
        if math.isnan(self.error):
            return math.inf
        return self.error / self.bound if self.bound else math.inf if self.error else 0.0


@dataclasses.dataclass(frozen=True)
class Case:
    """A question, and how to measure the answer at one dtype."""

    name: str
    group: str
    tests: str
    reason: str  # for the bound
    measure: Callable[[Subject, torch.dtype], Measurement]
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)

    def run(self, subject: Subject) -> CaseResult:
        """Ask at every dtype. A norm that raises fails; one that does not support a dtype is not judged there."""
        measured: dict[str, Measurement] = {}
        passed: dict[str, bool] = {}
        failed = refused = ""
        for dtype in self.dtypes:
            name = dtype_name(dtype)
            try:
                measured[name] = self.measure(subject.drawing_for(self.name), dtype)
                passed[name] = measured[name].within
            except Unsupported as refusal:
                refused = f"not judged: {refusal}"
            except RAISED as error:
                passed[name] = False
                failed = described(error) if isinstance(error, NormError) else f"it raises {described(error)}"
        if failed or not measured:
            error, bound, note = None, None, failed or refused
        else:
            error, bound, note = worst(measured) if len(self.dtypes) > 1 else next(iter(measured.values()))
        return CaseResult(
            self.name, self.group, self.tests, error, bound, self.reason,
            passed=all(passed.values()), dtypes=passed, note=note,
        )  # fmt: skip


def against_truth(candidate: Candidate, x: Tensor, y: Tensor | None = None) -> Measurement:
    """Compare the norm of ``x`` with float64. ``y`` is the norm's output if it is known."""
    with torch.no_grad():
        values, bound = candidate.truth(x)  # before the norm, which may write into its input
        return worst_element(candidate(x) if y is None else y, values, bound)


def worst_element(value: Tensor, expected: Tensor, bound: Tensor) -> Measurement:
    """Return error and bound of the element with the largest ratio; ``bound`` is float64 on the CPU.

    The error is 0 for equal infinities and for two NaNs, and NaN for a NaN and a number.
    """
    if value.numel() == 0:
        return Measurement(0.0, 0.0)
    a, b = (tensor.detach().cpu().double() for tensor in (value, expected))
    error = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    ratio = torch.where(error == 0, 0.0, error / bound).nan_to_num(nan=math.inf, posinf=math.inf)
    index = int(ratio.argmax())
    return Measurement(error.flatten()[index].item(), bound.flatten()[index].item())


def same_numbers(value: Tensor, expected: Tensor) -> Measurement:
    """Return the largest difference between two tensors that must be equal."""
    return worst_element(value, expected, torch.zeros_like(expected, dtype=torch.float64, device="cpu"))


def worst(measurements: dict[str, Measurement]) -> Measurement:
    """Return the measurement with the largest ratio. Its note says which one it is."""
    name = max(measurements, key=lambda key: measurements[key].ratio)
    found = measurements[name]
    if found.error == 0:
        return found
    return found._replace(note=f"worst at {name}" + (f"; {found.note}" if found.note else ""))
