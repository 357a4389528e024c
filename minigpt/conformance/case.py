"""One question to a norm: tensors that are compared, at which dtypes, and the result."""

import dataclasses
import enum
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar

import torch

from minigpt.conformance.compare import Kind, Outcome
from minigpt.conformance.subject import Subject, Unsupported
from minigpt.errors import NormError, raised
from minigpt.machine import one_thread
from minigpt.norms.foreign.locate import last_line
from minigpt.norms.foreign.packages import NotSupported
from minigpt.precision import DTYPES
from minigpt.report.numerals import brief


class Axis(enum.Enum):
    """The property of the input, or of the call, that a case varies."""

    KIND = "kinds of rows"
    WIDTH = "widths"
    ROWS = "numbers of rows"
    BATCH = "batch sizes"
    SEQUENCE = "sequence lengths"
    SHAPE = "shapes"
    STRIDES = "strides"
    GRADIENT = "settings of a backward pass"
    BEHAVIOUR = "behaviours"

    def named(self, value: str) -> str:
        """Return the name of a value on this axis: "width 64"."""
        return NAMES.get(self, "{}").format(value)


NAMES = {
    Axis.WIDTH: "width {}",
    Axis.ROWS: "{} rows",
    Axis.BATCH: "batch of {}",
    Axis.SEQUENCE: "sequence of {}",
    Axis.SHAPE: "{} input",
    Axis.STRIDES: "non-contiguous: {}",
}

Outcomes = Iterator[Outcome]
Compare = Callable[[Subject, torch.dtype], Outcomes]


@dataclasses.dataclass(frozen=True)
class Case:
    """A question, and what to compare for the answer at one dtype.

    Attributes:
        reason: for the bound.
        axis, value: what the case varies, and the value there.
        is_threaded: whether the norm runs on all threads, which share the work of a call, or may disturb it.
    """

    name: str
    group: str
    tests: str
    reason: str
    compare: Compare
    axis: Axis
    value: str
    is_threaded: bool = False

    @property
    def is_backward(self) -> bool:
        """True if it compares gradients."""
        return self.group == "gradients"

    def run(self, subject: Subject, untried: Collection[str] = ()) -> "CaseResult":
        """Ask at every dtype. A norm that raises fails; at a dtype that it refuses it is not judged.

        Args:
            untried: names of dtypes at which it is not tried, since the norm fails there already.
        """
        outcomes = {}
        is_threaded = self.axis in (Axis.ROWS, Axis.BATCH, Axis.SEQUENCE) or self.is_threaded
        threads = torch.get_num_threads() if is_threaded else 1
        with one_thread():
            for name, dtype in DTYPES.items():
                if name in untried:
                    outcomes[name] = Outcome(Kind.REFUSED, math.inf, note="other cases fail at this dtype")
                    continue
                drawing = subject.drawing_for(f"{self.name}, {name}", threads)
                outcomes[name] = self._judged(drawing, dtype)
        return CaseResult(**vars(self), outcomes=outcomes)

    @torch.no_grad()
    def _judged(self, subject: Subject, dtype: torch.dtype) -> Outcome:
        refusal = subject.raises.get(dtype)
        if refusal and dtype == torch.float64:  # many kernels have none; one that raises later is no such kernel
            return Outcome(Kind.REFUSED, math.inf, note=refusal)
        outcomes: list[Outcome] = []
        try:
            for outcome in self.compare(subject, dtype):
                outcomes.append(outcome)
        except Unsupported as error:
            return Outcome(Kind.REFUSED, math.inf, note=str(error))
        except NotSupported as error:
            if not outcomes:  # else what was compared before counts
                return Outcome(Kind.REFUSED, math.inf, note=str(error))
        except NormError as error:
            return Outcome(Kind.RAISED, math.inf, note=str(error))
        except raised() as error:
            return Outcome(Kind.RAISED, math.inf, note=f"it raises {last_line(error)}")
        parts = set[str]()
        for outcome in outcomes:
            parts |= outcome.parts
        worst = max(outcomes, key=lambda outcome: outcome.ratio)
        lost = max(outcome.lost for outcome in outcomes)
        return dataclasses.replace(worst, parts=frozenset(parts), lost=lost)


@dataclasses.dataclass(frozen=True)
class CaseResult(Case):
    """The answer to one question at each dtype."""

    outcomes: dict[str, Outcome] = dataclasses.field(kw_only=True)  # by dtype

    def notes_at(self, *kinds: Kind) -> dict[str, str]:
        """Return the notes of outcomes of these kinds, by dtype."""
        return {dtype: outcome.note for dtype, outcome in self.outcomes.items() if outcome.kind in kinds}

    @property
    def dtypes(self) -> dict[str, bool]:
        """True or False for each dtype: it passed or not. A dtype that was not judged is absent."""
        judged = {dtype: outcome.kind for dtype, outcome in self.outcomes.items() if outcome.kind is not Kind.REFUSED}
        return {dtype: kind is Kind.RIGHT for dtype, kind in judged.items()}

    @property
    def is_judged(self) -> bool:
        """True if it passed or failed at some dtype."""
        return bool(self.dtypes)

    @property
    def passed(self) -> bool:
        """True if it failed at no dtype."""
        return not self.failed_at

    @property
    def failed_at(self) -> set[str]:
        """The names of the dtypes at which it failed."""
        return {*self.notes_at(Kind.WRONG, Kind.RAISED)}

    @property
    def wrong_at(self) -> set[str]:
        """The names of the dtypes at which its numbers are wrong."""
        return {*self.notes_at(Kind.WRONG)}

    @property
    def refused(self) -> dict[str, str]:
        """The reason for each dtype where it was not judged."""
        return self.notes_at(Kind.REFUSED)

    @property
    def worst(self) -> Outcome:
        """The outcome that a report shows: the one that raised, else that with the largest ratio."""
        return max(self.outcomes.values(), key=lambda outcome: (outcome.kind is not Kind.REFUSED, outcome.ratio))

    @property
    def worst_measured(self) -> Outcome:
        """The outcome with the largest ratio among those that measured something; ``worst`` if none did."""
        measured = [outcome for outcome in self.outcomes.values() if outcome.error is not None]
        return max(measured, key=lambda outcome: outcome.ratio, default=self.worst)

    @property
    def note(self) -> str:
        """The place of the largest error, or why nothing was measured."""
        worst = self.worst
        if worst.kind is Kind.REFUSED:
            return f"not judged: {worst.note}"
        if worst.error is None:
            return worst.note
        where = []
        for dtype, outcome in self.outcomes.items():
            if outcome is worst and len(self.outcomes) > 1:
                where.append(dtype)
        if worst.note:
            where.append(worst.note)
        if worst.error == 0 or not where:
            return ""
        return f"worst at {', '.join(where)}"

    def without(self, dtypes: set[str]) -> "CaseResult":
        """Return the result without the outcomes at ``dtypes``."""
        rest = {dtype: outcome for dtype, outcome in self.outcomes.items() if dtype not in dtypes}
        return dataclasses.replace(self, outcomes=rest)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON types."""
        worst = self.worst
        return {
            "name": self.name,
            "group": self.group,
            "axis": self.axis.value,
            "value": self.value,
            "tests": self.tests,
            "error": worst.error,
            "bound": worst.bound,
            "reason": self.reason,
            "passed": self.passed,
            "dtypes": self.dtypes,
            "note": self.note,
            "refused": self.refused,
            "parts": sorted(worst.parts),
            "place": worst.place,
        }

    def __str__(self) -> str:
        return f"{self.verdict} {self.summary}"

    @property
    def verdict(self) -> str:
        """The verdict in a word, or two."""
        if not self.is_judged:
            return "not judged"
        return "pass" if self.passed else "FAIL"

    @property
    def summary(self) -> str:
        """The name, the error and its bound, and where."""
        worst = self.worst
        words = self.name
        if worst.error is not None:
            words += f": error {brief(worst.error)}, bound {brief(worst.bound)}"
        notes = ", ".join(filter(None, (self.note, worst.place)))
        if notes:
            words += f" ({notes})"
        return words


OfGroup = TypeVar("OfGroup", Case, CaseResult)


def by_group(cases: Iterable[OfGroup]) -> dict[str, list[OfGroup]]:
    """Return cases, or their results, by the group that they belong to."""
    groups: dict[str, list[OfGroup]] = {}
    for case in cases:
        groups.setdefault(case.group, []).append(case)
    return groups


def judged_at(cases: Iterable[CaseResult]) -> set[str]:
    """Return the names of the dtypes at which some of these cases were judged."""
    names = set[str]()
    for case in cases:
        names |= case.dtypes.keys()
    return names
