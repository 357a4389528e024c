"""The conformance kit: run the cases on one norm and, if one fails, say what is wrong."""

import dataclasses
import warnings
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch

from minigpt.conformance.behaviour import BEHAVIOUR_CASES
from minigpt.conformance.case import EPS, EXACTLY, Case, CaseResult, Subject
from minigpt.conformance.cases import COMPILE_CASES, GRADIENT_CASES, VALUE_CASES, best_backend
from minigpt.conformance.diagnosis import diagnoses, most_important
from minigpt.device import DTYPES, Progress, Steps, full_products, require_values, resolve_device, software
from minigpt.errors import NormError
from minigpt.files import finite
from minigpt.norms import NormSpec, notes
from minigpt.norms.registry import require_on
from minigpt.watch import changed_on_import, watched

PROCESS = "process left as it was"
UNLIMITED = 10**6  # programs: a norm that compiles itself does so for every width and dtype
CASES = [*VALUE_CASES, *BEHAVIOUR_CASES, *GRADIENT_CASES, *COMPILE_CASES]


@dataclasses.dataclass(frozen=True)
class ConformanceReport:
    """Every case of one norm, and the names of its mistakes."""

    norm: str
    device: str
    eps: float
    seed: int
    versions: dict[str, str]
    notes: list[str]  # remarks, for example on an eps that cannot be set
    cases: list[CaseResult]
    diagnoses: list[str]  # empty if the norm passed

    @property
    def passed(self) -> bool:
        """True if every case passed, at every dtype."""
        return all(case.passed for case in self.cases)

    @property
    def dtypes(self) -> dict[str, bool]:
        """Whether the norm is a LayerNorm at each dtype. A dtype that no case judged is absent."""
        return {
            dtype: all(case.dtypes.get(dtype, True) for case in self.cases)
            for dtype in DTYPES
            if any(dtype in case.dtypes for case in self.cases)
        }

    @property
    def failures(self) -> list[CaseResult]:
        return [case for case in self.cases if not case.passed]

    def diagnoses_at(self, dtype: str) -> list[str]:
        """Return the diagnoses, those of ``dtype`` before those of other dtypes."""
        return most_important(self.diagnoses, dtype)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON types; a number that is not finite is null."""
        return finite({"verdict": "pass" if self.passed else "fail", **dataclasses.asdict(self), "dtypes": self.dtypes})

    def __str__(self) -> str:
        """Return the verdict, the diagnoses and the failed cases, a line each."""
        wrong = ", ".join(dtype for dtype, passed in self.dtypes.items() if not passed)
        judgement = "is a LayerNorm" if self.passed else f"is not a LayerNorm at {wrong}"
        counted = f"{len(self.cases) - len(self.failures)} of {len(self.cases)} cases pass"
        said = [*(f"diagnosis: {diagnosis}" for diagnosis in self.diagnoses), *map(str, self.failures)]
        return "\n  ".join([f"{self.norm} {judgement} on {self.device}: {counted}", *said])


def check_norm(
    norm: NormSpec,
    *,
    device: str | torch.device | None = None,
    progress: Progress | None = None,
    cases: str | Iterable[str] = "*",
    seed: int = 0,
    compile_backend: str | None = None,
) -> ConformanceReport:
    """Judge whether ``norm`` is a LayerNorm with GPT-2's eps: (x - mean) / sqrt(var + 1e-5) * weight + bias.

    Needs no model. Every case measures the norm's error against float64 on the same input. The bound is what rounding
    can add in a correct norm. If a case fails, probes look for the mistake, by inputs and outputs only. TF32 is off.

    Args:
        norm: a norm, as ``norms.build`` takes it. One that is registered as inexact is expected to fail.
        device: where to run it; CUDA by default if there is one, else the CPU.
        progress: called with the name of each group of cases when it begins, and the share of groups done.
        cases: one or more shell-style patterns for names and groups of cases ("values", "gradients*").
        seed: of the rows and weights.
        compile_backend: of torch.compile; inductor by default if it can compile for this device, else aot_eager.

    Raises:
        NormError: if the norm is unknown or unavailable, cannot be built or run at all, or no case matches.
        ConfigError: if the device is unknown or absent.
    """
    import torch._dynamo as dynamo

    device = resolve_device(device)
    require_values(device)
    chosen = _matching(cases)
    groups = list(dict.fromkeys(case.group for case in chosen))
    begin = Steps(progress, total=len(groups) + 1)
    subject = Subject(norm, device, seed=seed, compile_backend=compile_backend or best_backend(device))
    unlimited = dynamo.config.patch(recompile_limit=UNLIMITED, accumulated_recompile_limit=UNLIMITED)
    with torch.inference_mode(False), full_products(), unlimited, warnings.catch_warnings(), watched() as last:
        warnings.simplefilter("ignore")  # the variance of a row of one number warns
        with watched() as changes:
            candidate = subject.candidate()
            candidate(subject.put(torch.ones(4, 64)))
        results, found, said = [], [], [*notes(candidate.module)]
        for group in groups:
            begin(f"checking {group}" if group != "compile" else f"compiling with {subject.compile_backend}")
            with watched() as more:
                results += [case.run(subject) for case in chosen if case.group == group]
            changes += more
        if not all(result.passed for result in results):
            begin("looking for what is wrong")
            found = diagnoses(subject, results)
    require_on(norm, device)
    changes = [*dict.fromkeys([*changed_on_import(candidate.foreign), *changes, *last])]
    if chosen == CASES or changes:
        results.append(process_result(changes))
        found = [f"it changes the process: {', '.join(changes)}"] * bool(changes) + found
    return ConformanceReport(subject.name, str(device), EPS, seed, software(), said, results, found)


def process_result(changes: list[str]) -> CaseResult:
    """Return what came of watching the process during all other cases."""
    passed = dict.fromkeys(DTYPES if changes else (), False)
    return CaseResult(
        PROCESS, "process", "settings and functions of PyTorch, the working directory", None, None, EXACTLY,
        not changes, passed, ", ".join(changes),
    )  # fmt: skip


def case_names() -> list[str]:
    """Return the names of all cases, in the order in which ``check_norm`` runs them."""
    return [case.name for case in CASES]


def _matching(cases: str | Iterable[str]) -> list[Case]:
    patterns = [cases] if isinstance(cases, str) else list(cases)
    chosen = [case for case in CASES if any(fnmatchcase(name, p) for p in patterns for name in (case.name, case.group))]
    if not chosen:
        groups = ", ".join(dict.fromkeys(case.group for case in CASES))
        raise NormError(f"no case matches {' or '.join(map(repr, patterns))}; the groups of cases are {groups}")
    return chosen
