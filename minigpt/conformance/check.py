"""The conformance kit: run the cases on one norm, and where one fails say what is wrong."""

import warnings
from collections.abc import Iterable
from fnmatch import fnmatchcase
from numbers import Integral

import torch

from minigpt.conformance.behaviour import BEHAVIOUR_CASES
from minigpt.conformance.case import Case
from minigpt.conformance.compiling import COMPILE_CASES, always_compiling, best_backend, require_backend
from minigpt.conformance.conformance_report import ConformanceReport
from minigpt.conformance.diagnosis import diagnoses
from minigpt.conformance.gradients import GRADIENT_CASES
from minigpt.conformance.layouts import LAYOUT_CASES
from minigpt.conformance.settings import settings_kept
from minigpt.conformance.subject import EPS, Subject
from minigpt.conformance.values import VALUE_CASES
from minigpt.errors import ConfigError, NormError
from minigpt.judge.reference import full_products
from minigpt.measure.environment import software
from minigpt.measure.steps import Progress, Steps
from minigpt.norms import NormSpec
from minigpt.placement import require_values, resolve_device
from minigpt.swap.sites import patterns_of

CASES = [*VALUE_CASES, *LAYOUT_CASES, *BEHAVIOUR_CASES, *GRADIENT_CASES, *COMPILE_CASES]


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

    No model is needed. Every case measures the norm's deviation from float64 on the very numbers it was given, against
    a bound that follows from the rounding of a correct norm in that row. Where a case fails, further probes look for
    the mistake; they see inputs and outputs alone. TF32 is off meanwhile.

    Args:
        norm: as ``norms.build`` takes it. It is expected to fail if it is registered as inexact.
        device: where to run it; by default CUDA where there is one, else the CPU.
        progress: called with a few words on each group of cases as it begins, and the share of the groups done.
        cases: a shell-style pattern, or several, over the cases' names and groups ("values", "gradients*").
        seed: of the rows and weights, within [0, 2^63).
        compile_backend: of torch.compile; by default inductor where it can compile for this device, else aot_eager.

    Raises:
        NormError: it cannot be judged: it is unknown or unavailable, cannot be built or run at all, or no case matches.
        ConfigError: the device is unknown or absent, or is meta, which computes nothing; the compiler is unknown; or
            the seed is out of range.
    """
    if not isinstance(seed, Integral) or not 0 <= seed < 2**63:
        raise ConfigError(f"seed must lie within [0, 2^63), not {seed!r:.100}")
    device = resolve_device(device)
    require_values(device)
    chosen = _matching(cases)
    groups = list(dict.fromkeys(case.group for case in chosen))
    begin = Steps(progress, total=len(groups) + 1)
    if compile_backend is not None:
        require_backend(compile_backend)
    subject = Subject(norm, device, seed=seed, compile_backend=compile_backend or best_backend(device))
    with torch.inference_mode(False), full_products(), settings_kept(), always_compiling(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a variance over a row of one number warns, and is asked for here
        subject.require_judgeable()
        results = []
        for group in groups:
            begin(f"checking {group}" if group != "compile" else f"compiling with {subject.compile_backend}")
            results += [case.run(subject) for case in chosen if case.group == group]
        found = []
        if not all(result.passed for result in results):
            begin("looking for what is wrong")
            found = diagnoses(subject, results)
        notes = subject.notes
    return ConformanceReport(
        norm=subject.name,
        device=str(device),
        eps=EPS,
        seed=seed,
        versions=software(),
        notes=notes,
        cases=results,
        diagnoses=found,
    )


def case_names() -> list[str]:
    """Every case that ``check_norm`` runs, in its order."""
    return [case.name for case in CASES]


def _matching(cases: str | Iterable[str]) -> list[Case]:
    patterns = patterns_of(cases, "cases", "gradients*")
    for pattern in patterns:
        if not any(_matches(case, pattern) for case in CASES):
            groups = ", ".join(dict.fromkeys(case.group for case in CASES))
            raise NormError(f"no case matches {pattern!r}; the groups of cases are {groups}")
    return [case for case in CASES if any(_matches(case, pattern) for pattern in patterns)]


def _matches(case: Case, pattern: str) -> bool:
    return fnmatchcase(case.name, pattern) or fnmatchcase(case.group, pattern)
