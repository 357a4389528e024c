"""From failed cases to the name of the mistake, by probes alone: nobody's source is read."""

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial

import torch

from minigpt.conformance.behaviour import CHANGES, ROUNDING
from minigpt.conformance.conformance_report import CaseResult
from minigpt.conformance.formula import (
    BATCH,
    MISPLACED,
    ignored_eps,
    no_number,
    other_in_company,
    other_without_gradients,
    wrong_affine,
    wrong_deviation,
    wrong_dimension,
    wrong_statistics,
)
from minigpt.conformance.gradients import VALUES
from minigpt.conformance.precision import cancelling_variance, kept_in, narrow_half_statistics, narrow_statistics
from minigpt.conformance.probe import Probe, Unanswered
from minigpt.conformance.subject import Subject
from minigpt.conformance.values import ROW_COUNTS
from minigpt.norms.triton import interpreting
from minigpt.placement import DTYPES
from minigpt.processor import HALVES

# What may be wrong whatever the formula is: the case whose failure shows it, and what to call it
SYMPTOMS = {
    "input left as it was": "it modifies its input",
    "output left as it was": "its next call writes over its output",
    "weights that change": "it keeps its weights: it computes with them after they have changed",
    "a row in any company": BATCH,
}
UNSTEADY = {"same input, same output": "it answers differently from call to call"}
COMPILED = {
    "compiled equals eager": "it differs under torch.compile",
    "compiled gradients equal eager": "its gradients differ under torch.compile",
}

# What is wrong in some cases while the formula is right; "{}" stands for what the "*" in each of their names was
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
LAST_PARTS = {  # said where nothing else is, since most other mistakes show here as well
    "rows of several dimensions": "wrong only for rows of several dimensions",
    "no bias": "wrong only without a bias",
    "autocast, *": "wrong only under autocast, with {}",
    "another eps": "wrong only with another eps",
}
NARROW = {kept_in(dtype) for dtype in HALVES}
LITTLE = {*COMPILED.values(), *NARROW}  # may hide mistakes of another kind
WITH = {"no bias": "without a bias, "}  # what only this case has it do
MANY = 4  # so many are not listed one by one
REFUSED = ("widths", "values", "layouts", "behaviour")  # the groups of cases in which a norm should answer at all
INPUT = re.compile(r"(?<!\w)\d[\d, ]*| in b?float\d+$")  # its shape, and at the end its dtype
GROSS = 0.1  # an error that no eps and no rounding leaves in ordinary rows

Failures = dict[str, CaseResult]


def diagnoses(subject: Subject, results: Sequence[CaseResult]) -> list[str]:
    """What is wrong with a norm that failed some of these cases, most telling first; at least one sentence."""
    failures = {case.name: case for case in results if not case.passed}
    right = {case.name for case in results if case.passed and case.error is not None}
    if unsteady := _by_symptom(UNSTEADY, failures):  # what is no function of its input has no formula
        return unsteady
    if leaking := [case.note for case in failures.values() if case.note.startswith(CHANGES)]:
        return leaking  # it spoils the very asking: of what else it does nothing can be told
    asked = [name in right for name in (*failures, *right) if name.startswith("float32, ")]
    found = _by_width(failures, right)
    found = found or _by_probing(Probe(subject), bool(asked) and all(asked), "3-D input" in right)
    if not found:  # a wrong formula may amplify rounding, which compiling may well do elsewhere
        found += _by_symptom(COMPILED, failures) or _uncompiled(failures)
    if not any(said.startswith(MISPLACED) for said in found):  # over its batch, say
        found += _by_symptom(SYMPTOMS, failures)
    if all(said in LITTLE or said.endswith(ROUNDING) for said in found):  # or nothing
        named = bool(NARROW.intersection(found))
        rest = {name: case for name, case in failures.items() if not (named and case.is_of_halves)}
        found += _by_part(rest, right) + _wrong_gradients(rest)
    found += _refusals({name: case for name, case in failures.items() if case.group in REFUSED})
    return _each_once(found) or [f"no mistake known by name; the first case that fails is {next(iter(failures))!r}"]


def _by_probing(probe: Probe, float32_is_right: bool, layout_is_right: bool) -> list[str]:
    """The formula, from the outside in: one mistake can hide those behind it, so each look needs the ones before.

    What is told of float32 is told of rows; over which dimensions it normalizes, of inputs of three.
    """
    but = ", but not for float32 input" if float32_is_right and probe.dtype == torch.float64 else ""
    formula, others = _formula(probe)
    return [said + but * (layout_is_right or not said.startswith(MISPLACED)) for said in formula] + others


def _formula(probe: Probe) -> tuple[list[str], list[str]]:
    """What is wrong with it, and what with the eps that it should be told and with its precision."""
    for hopeless in (no_number, other_without_gradients, wrong_dimension):
        if found := _found(hopeless, probe):
            return found, []
    affine = _found(wrong_affine, probe)
    if company := _found(other_in_company, probe):
        return affine + company, []
    statistics = _found(wrong_statistics, probe)
    if statistics:  # without mean or deviation there is no eps to be wrong, nor rounding to be told from them
        return affine + statistics, []
    precision = _found(narrow_statistics, probe) or _found(cancelling_variance, probe)
    if precision:  # of every dtype, the probe's own among them
        return affine, precision
    others = _found(ignored_eps, probe)
    for dtype in (torch.float16, torch.bfloat16):
        others += _found(partial(narrow_half_statistics, dtype=dtype), probe)
    return affine + _found(wrong_deviation, probe), others


def _found(look: Callable[[Probe], list[str]], probe: Probe) -> list[str]:
    """What a probe finds; nothing where the norm does not answer, which its failed cases tell better."""
    try:
        return look(probe)
    except Unanswered:
        return []


def _by_symptom(symptoms: dict[str, str], failures: Failures) -> list[str]:
    shown = {name: failures[name] for name in symptoms if name in failures and failures[name].error is not None}
    return [symptoms[name] + f", {ROUNDING}" * (ROUNDING in case.note) for name, case in shown.items()]


def _uncompiled(failures: Failures) -> list[str]:
    case = failures.get("compiled equals eager")
    return [f"it fails under torch.compile: {case.note}"] if case else []


def _by_width(failures: Failures, right: set[str]) -> list[str]:
    """Of a norm that is right at GPT-2's own width, where it is far off: its formula is not what is wrong."""
    wrong = {name: case.error for name, case in failures.items() if case.group == "widths" and case.error is not None}
    gross = any(error > GROSS for name, error in wrong.items() if name != "width 1")  # a constant row, and no width
    return _matching(PARTS, list(wrong)) if gross and "width 768" in right else []


def _by_part(failures: Failures, right: set[str]) -> list[str]:
    """Which kinds of input are wrong, while others are right."""
    told = {name: case for name, case in failures.items() if case.group not in ("gradients", "compile")}
    spoilt = [dtype for dtype in DTYPES if f"{dtype}, ordinary rows" in told]
    rest = [name for name in told if not name.startswith(tuple(f"{dtype}, " for dtype in spoilt))]
    if spoilt:  # each width is met with several dtypes, and so is each number of dimensions
        theirs = tuple(f"worst at {dtype}" for dtype in spoilt)
        several = ("widths", "layouts")
        rest = [name for name in rest if told[name].group not in several or not told[name].note.startswith(theirs)]
    if "float32" in spoilt:  # in which everything is asked that is not said of a dtype
        if "float64, ordinary rows" not in right:  # half precision is too coarse to tell more
            return [] if told["float32, ordinary rows"].error is not None else _refusals(told)
        rest = [name for name in rest if told[name].group in ("values", "special")]
    if any(name.endswith("constant rows") for name in rest):  # a row of one number is one
        rest = [name for name in rest if name != "width 1"]
    refused = [name for name in rest if told[name].error is None]
    dropped = [name for name in refused if told[name].group == "widths"]
    if "3-D input" in refused:  # and with it every other way to lay out tokens
        dropped += [name for name in rest if told[name].group == "layouts" or name == "any mode"]
    if not any(name.startswith("width ") for name in right):
        dropped += [name for name in rest if told[name].group == "widths"]
    rest = [name for name in rest if name not in dropped and not (name in refused and name in WITH)]
    found = _refusals({name: told[name] for name in dropped}) + _matching(PARTS, rest) + _wrong_row_counts(rest)
    if any(f"{dtype}, ordinary rows" in right for dtype in DTYPES):
        found += [_wrong_dtype(told[f"{dtype}, ordinary rows"]) for dtype in spoilt]
    return found or _matching(LAST_PARTS, rest) or _refusals(told)


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
    if len(counts) >= MANY or not counts:  # wrong at every count is no mistake of counting
        return []
    if counts[0] > 1:
        fewer = max(count for count in ROW_COUNTS if count < counts[0])
        if fewer < counts[0] - 1:
            return [f"wrong for {counts[0]:,} rows, and right for {fewer:,}"]
        return [f"wrong only beyond {fewer:,} rows"]
    return [f"wrong only for {', '.join(f'{count:,}' for count in counts)} rows"]


def _wrong_gradients(failures: Failures) -> list[str]:
    """Named only where the values themselves are right."""
    wrong = {name: case for name, case in failures.items() if case.group == "gradients"}
    of_values = any(case.group in ("widths", "values", "layouts") for case in failures.values())
    named = (name for name, case in failures.items() if case.group == "behaviour")
    if not wrong or of_values or any(fnmatchcase(name, part) for name in named for part in PARTS):
        return []
    if all(case.error is None for case in wrong.values()):
        return _refusals(wrong)
    where = "" if len(wrong) >= MANY else f", in {', '.join(name.removeprefix('gradients, ') for name in wrong)}"
    if any(f"worst at {VALUES}" in case.note for case in wrong.values()):
        return [f"values are wrong where gradients are wanted too{where}"]
    leaves = {case.note.split("; ")[0].removeprefix("worst at ") for case in wrong.values() if case.error is not None}
    of = " and ".join(sorted(leaves))
    return [f"gradients are wrong though values are right, most of all of the {of}{where}"]


def _refusals(failures: Failures) -> list[str]:
    """What cases say that had nothing to measure, each once."""
    said = {name: case.note for name, case in failures.items() if case.error is None and case.note}
    anyway = {INPUT.sub("", note) for name, note in said.items() if name not in WITH}
    return _each_once(
        [note if INPUT.sub("", note) in anyway else WITH.get(name, "") + note for name, note in said.items()]
    )[:MANY]


def _each_once(said: Sequence[str]) -> list[str]:
    """Without those that differ from an earlier one in nothing but numbers, or the dtype of an input."""
    found: dict[str, str] = {}
    for one in said:
        found.setdefault(INPUT.sub("", one), one)
    return list(found.values())
