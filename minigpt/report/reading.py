"""A report read from its JSON by path, so that older and smaller reports can be read as well."""

import math
import string
from collections.abc import Iterator, Sequence
from typing import Any

from minigpt.errors import MiniGPTError

REQUIRED = ("model", "norm", "dtype", "verdict", "logits")


class Reading:
    """One value of a report, and its path in the report: ``reading["logits.rms_error"].number``.

    A field that the report does not have reads as absent, with value None.
    """

    def __init__(self, value: Any, path: str = "", label: str = "") -> None:
        self.value, self.path, self.label = value, path, label

    def __getitem__(self, path: str) -> "Reading":
        """The value at ``path``: keys with a dot between them."""
        key, _, rest = path.partition(".")
        self._require(dict, "an object")
        found = None if self.value is None else self.value.get(key)
        member = Reading(found, f"{self.path}.{key}".lstrip("."), self.label)
        return member[rest] if rest else member

    def __contains__(self, path: str) -> bool:
        """Whether there is something at ``path``, null included."""
        head, _, last = path.rpartition(".")
        holder = self[head].value if head else self.value
        return isinstance(holder, dict) and last in holder

    def __bool__(self) -> bool:
        return self.value is not None

    def __iter__(self) -> Iterator["Reading"]:
        """The members of a list; none if it is absent."""
        self._require(list, "a list")
        return (Reading(item, f"{self.path}.{i}", self.label) for i, item in enumerate(self.value or []))

    @property
    def names(self) -> list[str]:
        """The keys of an object; none if it is absent."""
        self._require(dict, "an object")
        return list(self.value or ())

    @property
    def number(self) -> float | None:
        """None if it is absent or not finite."""
        if self.value is None:
            return None
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            raise self._error("a number")
        return float(self.value) if math.isfinite(self.value) else None

    @property
    def text(self) -> str:
        """Empty if it is absent; the members of a list with commas between them."""
        if isinstance(self.value, list):
            return ", ".join(map(str, self.value))
        return "" if self.value is None else str(self.value)

    def _require(self, kind: type, wanted: str) -> None:
        if self.value is not None and not isinstance(self.value, kind):
            raise self._error(wanted)

    def _error(self, wanted: str) -> MiniGPTError:
        return MiniGPTError(f"{self.path} of {_name(self.label)} must be {wanted}, got {str(self.value)[:60]!r}")


def readings_of(reports: Sequence[dict[str, Any]]) -> list[Reading]:
    """Whole reports, labelled A, B, C if there are several.

    Raises:
        MiniGPTError: if one of them is not a parity report.
    """
    letters = string.ascii_uppercase
    labels = [""] if len(reports) == 1 else [f"{letters[i % 26]}{i // 26 or ''}" for i in range(len(reports))]
    for report, label in zip(reports, labels, strict=True):
        missing = [key for key in REQUIRED if not isinstance(report, dict) or key not in report]
        if missing:
            raise MiniGPTError(
                f"{_name(label)} is not a parity report: it has no {', '.join(map(repr, missing))}; "
                "write one with minigpt parity --json FILE"
            )
        if report["verdict"] not in ("pass", "fail"):
            raise MiniGPTError(f"the verdict of {_name(label)} must be 'pass' or 'fail', got {report['verdict']!r}")
    return [Reading(report, label=label) for report, label in zip(reports, labels, strict=True)]


def outcome_of(reading: Reading) -> str:
    """PASS, FAIL or DIFFERENT, as ``ParityReport.outcome`` says."""
    if reading["verdict"].value == "pass":
        return "PASS"
    return "FAIL" if reading["budget"] or reading["exact"].value is not False else "DIFFERENT"


def caution(readings: Sequence[Reading]) -> str | None:
    """Say in what the reports were not measured alike, so that their figures cannot be compared."""
    first, *others = readings
    named = ("model", "against", "dtype", "attention", "device", "prompts")
    versions = dict.fromkeys(f"versions.{name}" for reading in readings for name in reading["versions"].names)
    paths = [path for path in (*named, *versions) if any(other[path].value != first[path].value for other in others)]
    names = ", ".join(path.removeprefix("versions.").replace("_", " ") for path in paths)
    return f"Not measured alike: the reports differ in {names}." if names else None


def _name(label: str) -> str:
    return f"report {label}" if label else "the report"
