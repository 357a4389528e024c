"""One question to a norm: tensors that are compared, at which dtypes, and what came out."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from minigpt.conformance.subject import Subject, Unsupported
from minigpt.device import dtype_name
from minigpt.errors import RAISED, NormError
from minigpt.norms.foreign.locate import last_line
from minigpt.report.numerals import brief

EXACTLY = "the numbers must be the same: nothing is rounded"

# What is compared, the norm's numbers, the expected ones, and the largest error allowed: float64 on the CPU, or 0
Compared = tuple[str, Tensor, Tensor, Tensor | float]
Compare = Callable[[Subject, torch.dtype], Iterator[Compared]]


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
    """The element with the largest ratio of error and bound. A NaN's ratio is infinite."""

    ratio: float
    error: float
    bound: float
    what: str


@dataclasses.dataclass(frozen=True)
class Case:
    """A question, and what to compare for the answer at one dtype."""

    name: str
    group: str
    tests: str
    reason: str  # for the bound
    compare: Compare
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)

    def run(self, subject: Subject) -> CaseResult:
        """Ask at every dtype. A norm that raises fails; one that does not support a dtype is not judged there."""
        measured: list[Measurement] = []
        passed: dict[str, bool] = {}
        failed = refused = ""
        for dtype in self.dtypes:
            name = dtype_name(dtype)
            try:
                worst = self._worst(subject, dtype)
            except RAISED as error:
                said = str(error) if isinstance(error, NormError) else f"it raises {last_line(error)}"
                if isinstance(error, Unsupported) or dtype == torch.float64:
                    refused = f"not judged: {said}"
                else:
                    passed[name], failed = False, said
            else:
                passed[name] = worst.ratio <= 1
                measured.append(worst)
        error, bound, note = None, None, failed or refused
        if measured and not failed:
            _, error, bound, what = max(measured)
            note = f"worst at {what}" if error and what else ""
        return CaseResult(
            self.name, self.group, self.tests, error, bound, self.reason, all(passed.values()), passed, note
        )

    @torch.no_grad()
    def _worst(self, subject: Subject, dtype: torch.dtype) -> Measurement:
        worst = max(worst_element(*compared) for compared in self.compare(subject.drawing_for(self.name), dtype))
        places = [dtype_name(dtype)] * (len(self.dtypes) > 1) + [worst.what] * bool(worst.what)
        return worst._replace(what=", ".join(places))


def worst_element(what: str, value: Tensor, expected: Tensor, bound: Tensor | float) -> Measurement:
    """Return the element with the largest ratio. Equal infinities and two NaNs have no error; a NaN alone is one."""
    if value.numel() == 0:
        return Measurement(0.0, 0.0, 0.0, what)
    a, b = (tensor.detach().cpu().double() for tensor in (value, expected))
    error = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    bound = torch.as_tensor(bound, dtype=torch.float64).expand_as(error)
    ratio = torch.where(error == 0, 0.0, error / bound).nan_to_num(nan=math.inf, posinf=math.inf)
    index = int(ratio.argmax())
    worst = [float(figure.flatten()[index]) for figure in (ratio, error, bound)]
    return Measurement(worst[0], worst[1], worst[2], what)
