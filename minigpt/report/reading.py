"""A report as its JSON holds it, read by path, so that an older or smaller one can be read as well."""

import math
from collections.abc import Iterator
from typing import Any

from minigpt.errors import MiniGPTError

REQUIRED = ("model", "norm", "dtype", "verdict", "logits")


class Reading:
    """One value of a report, and where in the report it stands: ``reading["logits.rms_error"].number``.

    What a report does not hold reads as absent, with value None.
    """

    def __init__(self, value: Any, path: str = "", label: str = "") -> None:
        self.value, self.path, self.label = value, path, label
        self.whose = f"report {label}" if label else "the report"

    @classmethod
    def of_report(cls, report: dict[str, Any], label: str = "") -> "Reading":
        """A whole report. ``label`` tells it from another one beside it.

        Raises:
            MiniGPTError: it is no parity report.
        """
        reading = cls(report, label=label)
        lacking = [key for key in REQUIRED if not isinstance(report, dict) or key not in report]
        if lacking:
            raise MiniGPTError(
                f"{reading.whose} is no parity report, since it has no {', '.join(map(repr, lacking))}; "
                "write one with minigpt parity --json FILE"
            )
        if report["verdict"] not in ("pass", "fail"):
            raise MiniGPTError(f"{reading.whose} has the verdict {report['verdict']!r}, which is neither pass nor fail")
        return reading

    def __getitem__(self, path: str) -> "Reading":
        """The value at ``path``, whose steps are keys with a dot between."""
        head, _, rest = path.partition(".")
        if isinstance(self.value, dict):
            found = self.value.get(head)
        elif self.value is None:
            found = None
        else:
            raise self._error("an object")
        member = Reading(found, f"{self.path}.{head}".lstrip("."), self.label)
        return member[rest] if rest else member

    def __contains__(self, path: str) -> bool:
        """Whether there is something at ``path``, null included."""
        head, _, last = path.rpartition(".")
        holder = self[head].value if head else self.value
        return isinstance(holder, dict) and last in holder

    def __bool__(self) -> bool:
        return self.value is not None

    def __iter__(self) -> Iterator["Reading"]:
        """The members of a list; none where it is absent."""
        if self.value is not None and not isinstance(self.value, list):
            raise self._error("a list")
        return (Reading(item, f"{self.path}.{i}", self.label) for i, item in enumerate(self.value or []))

    @property
    def names(self) -> list[str]:
        """Of the members of an object; none where it is absent."""
        if self.value is not None and not isinstance(self.value, dict):
            raise self._error("an object")
        return list(self.value or ())

    @property
    def number(self) -> float | None:
        """None where it is absent or not finite."""
        if self.value is None:
            return None
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            raise self._error("a number")
        try:
            return float(self.value) if math.isfinite(self.value) else None
        except OverflowError:  # JSON's whole numbers may be longer than any float
            return None

    @property
    def text(self) -> str:
        """Empty where it is absent; a list is its members with a comma between."""
        if isinstance(self.value, list):
            return ", ".join(map(str, self.value))
        return "" if self.value is None else str(self.value)

    def _error(self, wanted: str) -> MiniGPTError:
        return MiniGPTError(f"{self.path} of {self.whose} is {str(self.value)[:60]!r}, not {wanted}")


def side_by_side(a: dict[str, Any], b: dict[str, Any]) -> tuple[Reading, Reading]:
    """Two whole reports, called A and B.

    Raises:
        MiniGPTError: one of them is no parity report.
    """
    return Reading.of_report(a, "A"), Reading.of_report(b, "B")


def caution(a: Reading, b: Reading) -> str | None:
    """In what two reports were not measured alike, so that their figures cannot be held against each other."""
    named = ("model", "dtype", "attention", "device", "prompts")
    versions = [f"versions.{name}" for name in dict.fromkeys([*a["versions"].names, *b["versions"].names])]
    differing = [path for path in (*named, *versions) if a[path].value != b[path].value]
    names = ", ".join(path.removeprefix("versions.").replace("_", " ") for path in differing)
    return f"Not measured alike: the two differ in {names}." if names else None
