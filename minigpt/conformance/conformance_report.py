"""What a conformance run found."""

import dataclasses
import re
from typing import Any

from minigpt.json_file import finite

HALF = re.compile(r"\b(b?float16|half)\b")
HALF_WENT_IN = re.compile(r" in b?float16$|: torch\.b?float16 went in")  # all else in an error may be anybody's words


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """One question to a norm. The error is at the element that comes nearest to its bound, or exceeds it the most."""

    name: str
    group: str
    tests: str
    error: float | None  # None where there was nothing to measure; the note says why
    bound: float | None
    reference_error: float | None  # what torch.nn.functional.layer_norm itself deviates, on the same input
    reason: str  # why the bound is what it is
    passed: bool
    note: str = ""

    @property
    def is_of_halves(self) -> bool:
        """Whether it is about half precision, or was worst there."""
        was_raised = self.error is None
        noted = HALF_WENT_IN.search(self.note) if was_raised else HALF.search(self.note.partition(";")[0])
        return bool(HALF.search(self.name) or noted)

    def __str__(self) -> str:
        verdict = "pass" if self.passed else "FAIL"
        measured = "" if self.error is None else f": error {self.error:.3g}, bound {self.bound:.3g}"
        theirs = "" if self.reference_error is None else f"; torch's own at its worst {self.reference_error:.3g}"
        note = f" ({self.note})" if self.note else ""
        return f"{verdict} {self.name}{measured}{theirs}{note}"


@dataclasses.dataclass(frozen=True)
class ConformanceReport:
    """Every case of one norm, and what is wrong with it, by name."""

    norm: str
    device: str
    eps: float
    seed: int
    versions: dict[str, str]
    notes: list[str]  # what its adapter has to say of it: an eps of its own, for one
    cases: list[CaseResult]
    diagnoses: list[str]  # empty where the norm passed

    @property
    def passed(self) -> bool:
        return all(case.passed for case in self.cases)

    @property
    def failures(self) -> list[CaseResult]:
        return [case for case in self.cases if not case.passed]

    @property
    def judgement(self) -> str:
        """What it is, to follow the norm's name."""
        if self.passed:
            return "is a LayerNorm"
        return "is not a LayerNorm" + " in half precision" * all(case.is_of_halves for case in self.failures)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON's own types; a number that is not finite is null."""
        return finite({"verdict": "pass" if self.passed else "fail"} | dataclasses.asdict(self))

    def __str__(self) -> str:
        """The verdict, the diagnoses and the failed cases, a line each."""
        counted = f"{len(self.cases) - len(self.failures)} of {len(self.cases)} cases pass"
        return "\n".join(
            [f"{self.norm} {self.judgement} on {self.device}: {counted}"]
            + [f"  diagnosis: {diagnosis}" for diagnosis in self.diagnoses]
            + [f"  {case}" for case in self.failures]
        )
