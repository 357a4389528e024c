"""The conformance kit: run the cases on one norm and, if one fails, say what is wrong."""

import contextlib
import secrets
import sys
import warnings
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from minigpt.conformance.behaviour import BEHAVIOUR_CASES
from minigpt.conformance.case import Axis, Case, CaseResult, by_group
from minigpt.conformance.cases import CASE_WIDTHS, COMPILE_CASES, GRADIENT_CASES, SIZES, VALUE_CASES
from minigpt.conformance.remarks import remarks, second_derivatives
from minigpt.conformance.subject import Subject
from minigpt.conformance.summary import ConformanceReport, NamedMistake
from minigpt.device import require_values, resolve_device
from minigpt.errors import NormError, listing
from minigpt.machine import kept_memory, software
from minigpt.norms import NormSpec
from minigpt.norms.foreign.arrays import ArrayFunction
from minigpt.norms.foreign.builder import Builder, claim_of
from minigpt.norms.foreign.locate import file_of
from minigpt.norms.formulas import GPT2_EPS
from minigpt.norms.registry import KINDS, require_on
from minigpt.precision import DTYPES, default_dtype, full_products
from minigpt.progress import Progress, Steps
from minigpt.watch import watched

UNLIMITED = 10**6  # programs
DYNAMO = "torch._dynamo"
CASES = [*VALUE_CASES, *BEHAVIOUR_CASES, *GRADIENT_CASES, *COMPILE_CASES]
COVERAGE = (
    f"{len(CASE_WIDTHS)} widths to {CASE_WIDTHS[-1]:,}; rows, texts and tokens to {SIZES[-1]:,}; 2 to 4 dimensions; "
    "values, gradients, calls, modes and torch.compile"
)
# A package that compiles each operation again for each shape takes a second for a shape. It is asked few.
FEW_VALUES = {  # of the values on an axis of many
    Axis.WIDTH: ("3", "1001", "4096"),
    Axis.ROWS: ("257",),
    Axis.BATCH: ("65",),
    Axis.SEQUENCE: ("257",),
}
FEW_GRADIENTS = {Axis.WIDTH: (), Axis.ROWS: ("257",), Axis.BATCH: (), Axis.SEQUENCE: ()}
SAME_WHEN_COPIED = "NaN-surrounded"  # a shape of an input whose memory does not reach another package


@default_dtype()
def check_norm(
    norm: NormSpec,
    *,
    kind: str | None = None,
    device: str | torch.device | None = None,
    progress: Progress | None = None,
    cases: str | Iterable[str] = "*",
    seed: int | None = None,
    arrays: str | None = None,
    every_case: bool = False,
) -> ConformanceReport:
    """Judge whether ``norm`` is a LayerNorm with GPT-2's eps: (x - mean) / sqrt(var + 1e-5) * weight + bias.

    Or, as ``kind`` says, an RMSNorm: x / sqrt(mean(x^2) + 1e-5) * weight, and + bias if the model has one.

    Needs no model. Every case measures the norm's error against float64 on the same input. The bound is what rounding
    can add in a correct norm. If a case fails, probes look for the mistake, by inputs and outputs only. TF32 is off.

    Args:
        norm: a norm, as ``norms.build`` takes it. One that is registered as inexact is expected to fail.
        kind: "layer_norm" or "rms_norm"; None for what the norm claims, a LayerNorm if it claims neither.
        device: where to run it; CUDA by default if there is one, else the CPU.
        progress: called with the name of each group of cases when it begins, and the share of groups done.
        cases: one or more shell-style patterns for names and groups of cases ("values", "gradients*").
        seed: of the rows and weights; None draws one, which the report has, so that a norm cannot know its rows.
        arrays: the package whose arrays the norm takes, if it is a function ``norm(x, weight, bias, eps)``: "numpy",
            "jax", ...; None for what its attribute ``arrays`` says. Without an attribute ``vjp`` its gradients are not
            judged.
        every_case: ask whether it compiles also at dtypes where another case fails.

    Raises:
        NormError: if the norm is unknown or unavailable, cannot be built or run at all, or no case or kind matches.
        ConfigError: if the device is unknown or absent.
    """
    device = resolve_device(device)
    require_values(device)
    if arrays is not None:
        function: Any = ArrayFunction(norm, arrays)
        norm = function
    builder = Builder(norm)
    if kind is None:
        is_of_file = isinstance(norm, str) and file_of(norm) is not None
        kind = claim_of(builder.make if is_of_file else norm) or "layer_norm"
    if kind not in KINDS:
        raise NormError(f"the kind of a norm must be {' or '.join(KINDS)}, got {kind!r}")
    if seed is None:
        seed = secrets.randbelow(2**31)
    subject = Subject(norm, device, seed, kind, builder)
    groups = by_group(asked_of(subject, [cases] if isinstance(cases, str) else list(cases)))
    begin = Steps(progress, total=len(groups) + 1)
    results: list[CaseResult] = []
    failed_at = set[str]()
    untried: list[str] = []
    with (
        torch.inference_mode(False),
        full_products(),
        kept_memory(),
        contextlib.ExitStack() as programs,
        warnings.catch_warnings(),
        watched() as changes,
    ):
        warnings.simplefilter("ignore")  # the variance of a row of one number warns
        candidate = subject.candidate()
        candidate.call(subject.put(torch.ones(4, 64)))  # it runs; what it returns is judged
        subject.try_dtypes()
        for group, members in groups.items():
            begin(f"checking {group}")
            for case in members:
                allow_programs(programs)
                if group == "compile" and not every_case:
                    untried = [dtype for dtype in DTYPES if dtype in failed_at]
                result = case.run(subject, untried)
                failed_at |= result.failed_at
                results.append(result)
        notes = remarks(subject, candidate, results)
        if untried:
            way_out = "every_case, in the shell --all, tries it there too"
            notes.append(f"torch.compile is not tried at {listing(untried)}, where other cases fail; {way_out}")
        mistakes: list[NamedMistake] = []
        if all(result.passed for result in results):
            if subject.array_function is None:
                notes += second_derivatives(subject)
        else:
            begin("looking for what is wrong")
            from minigpt.conformance.diagnosis import diagnoses  # it is for norms that are wrong alone

            mistakes = [NamedMistake(*named) for named in diagnoses(subject.drawing_for("diagnosis"), results)]
    require_on(norm, device)
    covered = COVERAGE
    if subject.array_function is not None:
        sizes = "few widths and sizes" if subject.has_few_shapes else COVERAGE.partition("; 2 to 4")[0]
        gradients = "" if candidate.lacks_gradients else "gradients, "
        covered = f"{sizes}; 2 to 4 dimensions; values, {gradients}calls and modes"
    if changes:
        notes.append(f"it changes the process: {', '.join(changes)}")
    return ConformanceReport(
        norm=subject.name,
        kind=kind,
        device=str(device),
        eps=GPT2_EPS,
        seed=seed,
        versions=software(),
        notes=notes,
        cases=results,
        mistakes=mistakes,
        coverage=covered,
    )


def allow_programs(block: contextlib.ExitStack) -> None:
    """Let a norm that compiles itself do so for every width and dtype, up to the end of a block.

    PyTorch's compiler takes a second to import. It is not imported for a norm that does not use it.
    """
    if DYNAMO not in sys.modules:
        return
    import torch._dynamo as dynamo

    if dynamo.config.recompile_limit != UNLIMITED:
        block.enter_context(dynamo.config.patch(recompile_limit=UNLIMITED, accumulated_recompile_limit=UNLIMITED))


def case_names() -> list[str]:
    """Return the names of all cases, in the order in which ``check_norm`` runs them."""
    return [case.name for case in CASES]


def asked_of(subject: Subject, patterns: Sequence[str]) -> list[Case]:
    """Return the cases that a norm is asked: those with a name or a group of these shell-style patterns.

    A function of arrays is not compiled by PyTorch, and some packages are asked few shapes.

    Raises:
        NormError: if no case matches.
    """
    chosen = []
    for case in CASES:
        names = (case.name, case.group)
        if any(fnmatchcase(name, pattern) for name in names for pattern in patterns):
            chosen.append(case)
    if not chosen:
        groups = ", ".join(by_group(CASES))
        raise NormError(f"no case matches {' or '.join(map(repr, patterns))}; the groups of cases are {groups}")
    if subject.array_function is not None:
        chosen = [case for case in chosen if case.group != "compile"]
    if subject.has_few_shapes:
        chosen = [case for case in chosen if _has_few_shapes(case)]
    return chosen


def _has_few_shapes(case: Case) -> bool:
    if case.axis is Axis.SHAPE:
        return case.value != SAME_WHEN_COPIED
    few = FEW_GRADIENTS if case.is_backward else FEW_VALUES
    return case.axis not in few or case.value in few[case.axis]
