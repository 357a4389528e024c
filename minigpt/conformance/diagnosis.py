"""From failed cases to the name of the mistake. Probes see inputs and outputs only; no source code is read.

``diagnoses`` looks in this order, and each step says when the later ones are skipped:

1. what makes probing meaningless: random answers, changed settings of the process;
2. the formula, by probes (``_by_probing``), unless the failures are those of single widths;
3. torch.compile, if the formula is right;
4. symptoms that are wrong whatever the formula is (``SYMPTOMS``);
5. parts of the input and gradients, if nothing larger explains them (``_by_part``, ``_wrong_gradients``);
6. what the norm raised.
"""

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial

import torch

from minigpt.conformance.behaviour import CHANGES
from minigpt.conformance.case import ROUNDING, CaseResult
from minigpt.conformance.gradients import VALUES
from minigpt.conformance.mistakes import (
    BATCH,
    MISPLACED,
    cancelling_variance,
    ignored_eps,
    kept_in,
    narrow_half_statistics,
    narrow_statistics,
    no_number,
    other_in_company,
    other_without_gradients,
    wrong_affine,
    wrong_deviation,
    wrong_dimension,
    wrong_statistics,
)
from minigpt.conformance.probe import Probe, Unanswered
from minigpt.conformance.subject import Subject
from minigpt.conformance.values import ROW_COUNTS
from minigpt.norms.triton import interpreting
from minigpt.placement import DTYPES, dtype_name
from minigpt.processor import HALVES

Failures = dict[str, CaseResult]
Look = Callable[[Probe], list[str]]

# Mistakes whatever the formula is: the case that shows each, and its name
UNSTEADY = {"same input, same output": "it answers differently from call to call"}
SYMPTOMS = {
    "input left as it was": "it modifies its input",
    "output left as it was": "its next call writes over its output",
    "weights that change": "it keeps its weights: it computes with them after they have changed",
    "a row in any company": BATCH,
}
COMPILED = {
    "compiled equals eager": "it differs under torch.compile",
    "compiled gradients equal eager": "its gradients differ under torch.compile",
}

# Mistakes in some kinds of input, by the cases that fail; "{}" stands for what "*" matches
PARTS = {
    "*, constant rows": "wrong only for constant rows",
    "*, massive activations": "wrong only for rows with massive activations",
    "*, mean far from 0": "wrong only for rows whose mean is far from 0",
    "*, deviation near sqrt(eps)": "wrong only for rows whose deviation is small",
    "*, trained weights": "wrong only for weights far from 1",
    "*, huge values": "wrong only for huge values",
    "*, tiny values": "wrong only for tiny values",
    "*, infinity and NaN": "wrong only where a row holds an infinity or a NaN",
    "*, overflowing squares": "wrong only where squares overflow",
    "non-contiguous: *": "wrong only for non-contiguous input: {}",
    "*-D input": "wrong only for {}-D input",
    "* token input": "wrong only for an input of {} token",
    "decoding input": "wrong only for a batch of one token each, as decoding has it",
    "width *": "wrong only at width {}",
    "residual added too*": "wrong only where it adds the residual too, in add_norm",
    "any mode": "its values depend on training mode, or on whether gradients are kept",
}
LAST_PARTS = {  # most other mistakes fail these cases as well, so they are named only if nothing else is
    "rows of several dimensions": "wrong only for rows of several dimensions",
    "no bias": "wrong only without a bias",
    "autocast, *": "wrong only under autocast, with {}",
    "another eps": "wrong only with another eps",
}
NARROW = {kept_in(dtype) for dtype in HALVES}
HALF_NAMES = {dtype_name(dtype) for dtype in HALVES}
LITTLE = {*COMPILED.values(), *NARROW}  # other mistakes may hide behind these
MANY = 4  # from this number on, do not list one by one
MUST_ANSWER = ("widths", "values", "layouts", "behaviour")  # groups in which a norm that raises is told so
INPUT = re.compile(r"(?<!\w)\d[\d, ]*| in b?float\d+$")  # in a message: the input's shape and, at the end, its dtype
GROSS = 0.1  # no eps and no rounding causes so large an error in ordinary rows


def diagnoses(subject: Subject, results: Sequence[CaseResult]) -> list[str]:
    """Return what is wrong with a norm that failed some of these cases, most important first; at least one sentence."""
    failures = {case.name: case for case in results if not case.passed}
    right = {case.name for case in results if case.passed and case.error is not None}
    if unsteady := _by_symptom(UNSTEADY, failures):
        return unsteady
    if changes := [case.note for case in failures.values() if case.note.startswith(CHANGES)]:
        return changes

    found = _by_width(failures, right) or _by_probing(Probe(subject), failures, right)
    if not found:  # compiling may change the rounding of a wrong formula, which is no second mistake
        found += _by_symptom(COMPILED, failures) or _uncompiled(failures)
    if not any(said.startswith(MISPLACED) for said in found):  # over the batch, for one
        found += _by_symptom(SYMPTOMS, failures)
    if all(said in LITTLE or said.endswith(ROUNDING) for said in found):
        explained = HALF_NAMES if NARROW.intersection(found) else set()
        rest = {name: case for name, case in failures.items() if not case.failed_at <= explained}
        found += _by_part(rest, right) + _wrong_gradients(rest)
    found += _raised({name: case for name, case in failures.items() if case.group in MUST_ANSWER})
    return _each_once(found) or [f"no mistake known by name; the first case that fails is {next(iter(failures))!r}"]


# Step 2: the formula


def _by_width(failures: Failures, right: set[str]) -> list[str]:
    """Name the widths, if the norm is right at width 768 and far off at others: its formula is right."""
    measured = {
        name: case.error for name, case in failures.items() if case.group == "widths" and case.error is not None
    }
    is_gross = any(error > GROSS for name, error in measured.items() if name != "width 1")  # a constant row
    return _matching(PARTS, list(measured)) if is_gross and "width 768" in right else []


def _by_probing(probe: Probe, failures: Failures, right: set[str]) -> list[str]:
    """Probe the formula. Say so if the mistake found at float64 is absent from float32."""
    formula, others = _formula(probe)
    asked = [name for name in (*failures, *right) if name.startswith("float32, ")]
    rows_are_right = bool(asked) and right.issuperset(asked)
    if probe.dtype == torch.float64 and rows_are_right:
        # Rows say nothing of dimensions: a misplaced norm is right at float32 only if 3-D input is
        tokens_are_right = "3-D input" in right
        formula = [
            said if said.startswith(MISPLACED) and not tokens_are_right else f"{said}, but not for float32 input"
            for said in formula
        ]
    return formula + others


def _formula(probe: Probe) -> tuple[list[str], list[str]]:
    """Return the mistakes of the formula at ``probe.dtype``, and those of its eps and of its precision.

    From the outside in: one mistake may hide those behind it, so each look needs the ones before.
    """
    for hopeless in (no_number, other_without_gradients, wrong_dimension):
        if found := _look(hopeless, probe):
            return found, []
    affine = _look(wrong_affine, probe)
    if company := _look(other_in_company, probe):
        return affine + company, []
    if statistics := _look(wrong_statistics, probe):  # without mean or deviation, neither eps nor rounding shows
        return affine + statistics, []
    if precision := _look(narrow_statistics, probe) or _look(cancelling_variance, probe):  # at every dtype
        return affine, precision
    others = _look(ignored_eps, probe)
    for dtype in (torch.float16, torch.bfloat16):
        others += _look(partial(narrow_half_statistics, dtype=dtype), probe)
    return affine + _look(wrong_deviation, probe), others


def _look(look: Look, probe: Probe) -> list[str]:
    """Return what a probe finds; nothing if the norm raises, which its failed cases tell better."""
    try:
        return look(probe)
    except Unanswered:
        return []


# Steps 3 and 4: what single cases show


def _by_symptom(symptoms: dict[str, str], failures: Failures) -> list[str]:
    shown = {name: failures[name] for name in symptoms if name in failures and not failures[name].raised}
    return [symptoms[name] + f", {ROUNDING}" * (ROUNDING in case.note) for name, case in shown.items()]


def _uncompiled(failures: Failures) -> list[str]:
    case = failures.get("compiled equals eager")
    fails_anyway = any(other.raised and other.group in MUST_ANSWER for other in failures.values())
    return [f"it fails under torch.compile: {case.note}"] if case and not fails_anyway else []


# Step 5: parts of the input


def _by_part(failures: Failures, right: set[str]) -> list[str]:
    """Name the kinds of input that are wrong while others are right."""
    told = {name: case for name, case in failures.items() if case.group not in ("gradients", "compile")}
    wrong_dtypes = [dtype for dtype in DTYPES if f"{dtype}, ordinary rows" in told]
    if "float32" in wrong_dtypes and "float64, ordinary rows" not in right:  # right at no dtype that shows a part
        return _raised(told) if told["float32, ordinary rows"].raised else []

    rest = {name: case for name, case in told.items() if not case.failed_at <= set(wrong_dtypes)}
    if "float32" in wrong_dtypes:  # all other groups are mostly about float32
        rest = {name: case for name, case in rest.items() if case.group in ("values", "special")}
    raised_first = _raised_everywhere(rest, right)
    rest = {name: case for name, case in rest.items() if name not in raised_first and not _follows(name, rest)}
    found = _raised(raised_first) + _matching(PARTS, list(rest)) + _wrong_row_counts(list(rest))
    if any(f"{dtype}, ordinary rows" in right for dtype in DTYPES):
        found += [_wrong_dtype(told[f"{dtype}, ordinary rows"]) for dtype in wrong_dtypes]
    return found or _matching(LAST_PARTS, list(rest)) or _raised(told)


def _raised_everywhere(failures: Failures, right: set[str]) -> Failures:
    """Return the failures of which the norm's own message says all: they name no part of the input."""
    raised_at_3d = "3-D input" in failures and failures["3-D input"].raised
    a_width_is_right = any(name.startswith("width ") for name in right)
    return {
        name: case
        for name, case in failures.items()
        if (case.group == "widths" and (case.raised or not a_width_is_right))
        or (raised_at_3d and (case.group == "layouts" or name == "any mode"))
    }


def _follows(name: str, failures: Failures) -> bool:
    """Return True if this failure only repeats another: a row of width 1 is a constant row."""
    return name == "width 1" and any(other.endswith("constant rows") for other in failures)


def _wrong_dtype(case: CaseResult) -> str:
    dtype = case.name.partition(",")[0]
    if case.error is None:
        return case.note
    narrowed = dtype == "float64" and case.error < 1e-4
    interpreted = dtype == "bfloat16" and interpreting()
    return (
        f"wrong only for {dtype} input"
        + ", which is computed in float32" * narrowed
        + " (if it is a Triton kernel: the interpreter cuts off what a device rounds)" * interpreted
    )


def _matching(parts: dict[str, str], names: Sequence[str]) -> list[str]:
    """Return the sentence of each part that one of these cases belongs to."""
    found = []
    for pattern, said in parts.items():
        before, _, after = pattern.partition("*")
        filled = [name.removeprefix(before).removesuffix(after) for name in names if fnmatchcase(name, pattern)]
        if filled:
            found.append(said.format(", ".join(filled)))
    return found


def _wrong_row_counts(names: Sequence[str]) -> list[str]:
    counted = [name.removesuffix(" rows").replace(",", "") for name in names if fnmatchcase(name, "[0-9]* rows")]
    counts = sorted(map(int, counted))
    if len(counts) >= MANY or not counts:  # wrong at every count: the count is not the reason
        return []
    if counts[0] <= 1:
        return [f"wrong only for {', '.join(f'{count:,}' for count in counts)} rows"]
    fewer = max(count for count in ROW_COUNTS if count < counts[0])
    if fewer < counts[0] - 1:
        return [f"wrong for {counts[0]:,} rows, and right for {fewer:,}"]
    return [f"wrong only beyond {fewer:,} rows"]


def _wrong_gradients(failures: Failures) -> list[str]:
    """Name the gradients that are wrong, if the values are right."""
    wrong = {name: case for name, case in failures.items() if case.group == "gradients"}
    values_are_wrong = any(case.group in ("widths", "values", "layouts") for case in failures.values())
    behaviour = [name for name, case in failures.items() if case.group == "behaviour"]
    if not wrong or values_are_wrong or _matching(PARTS, behaviour):
        return []
    if all(case.raised for case in wrong.values()):
        return _raised(wrong)
    where = "" if len(wrong) >= MANY else f", in {', '.join(name.removeprefix('gradients, ') for name in wrong)}"
    notes = [case.note for case in wrong.values() if not case.raised]
    if any(f"worst at {VALUES}" in note for note in notes):
        return [f"values are wrong where gradients are wanted too{where}"]
    of = " and ".join(sorted({_leaf(note) for note in notes}))
    return [f"gradients are wrong though values are right, most of all of the {of}{where}"]


def _leaf(note: str) -> str:
    """Return "input" for "worst at input", and for "worst at float32; worst at input"."""
    places = [place.removeprefix("worst at ") for place in note.split("; ")]
    return next(place for place in places if place not in DTYPES)


# Step 6: what the norm raised


def _raised(failures: Failures) -> list[str]:
    """Return the notes of the cases that could not be measured, each once."""
    return _each_once([case.note for case in failures.values() if case.raised])[:MANY]


def _each_once(said: Sequence[str]) -> list[str]:
    """Drop sentences that differ from an earlier one only in numbers, or in the dtype of an input."""
    found: dict[str, str] = {}
    for one in said:
        found.setdefault(INPUT.sub("", one), one)
    return list(found.values())
