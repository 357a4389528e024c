"""From failed cases to the name of the mistake. Probes see inputs and outputs only; no source code is read."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from minigpt.conformance.case import CaseResult
from minigpt.conformance.mistakes import BATCH, Probe, kept_in, wrong_formula
from minigpt.conformance.rows import ROW_KINDS
from minigpt.conformance.subject import Subject
from minigpt.placement import DTYPES, dtype_name
from minigpt.processor import HALVES

Failures = dict[str, CaseResult]

UNSTEADY = "same input, same output"  # a norm that fails this case cannot be probed

# Mistakes beside the formula, by the cases that show them
SYMPTOMS = {
    "input left as it was": "it modifies its input",
    "output left as it was": "its next call writes over its output",
    "weights that change": "it keeps its weights: it computes with them after they have changed",
}
# Mistakes in some kinds of input, by the cases that fail; "{}" is what "*" matches
PARTS = {
    **{f"*, {kind.name}": f"wrong only for {kind.name}" for kind in ROW_KINDS[1:]},
    "*, infinity and NaN": "wrong only where a row holds an infinity or a NaN",
    "non-contiguous: *": "wrong only for non-contiguous input: {}",
    "* input": "wrong only for {} input",
    "width *": "wrong only at width {}",
    "*[0-9] rows": "wrong only for {}",
    "residual added too": "wrong only where it adds the residual too, in add_norm",
    "any mode": "its values depend on training mode, or on whether gradients are kept",
    "a row in any company": BATCH,
}
# Most other mistakes fail these cases as well, so they are named only if nothing else is
LAST_PARTS = {
    "no bias": "wrong only without a bias",
    "autocast": "wrong only under autocast",
    "another eps": "wrong only with another eps",
    "compiled *": "it differs under torch.compile",
}
GRADIENTS = {"gradients, ordinary rows": "gradients are wrong though values are right"}
PARTS_OF_GRADIENTS = {"gradients, *": "gradients are wrong though values are right, in {}"}
GROSS = 0.1  # no eps and no rounding causes so large an error in ordinary rows


def diagnoses(subject: Subject, results: Sequence[CaseResult]) -> list[str]:
    """Return what is wrong with a norm that failed some of these cases, most important first; at least one sentence."""
    failed = {case.name: case for case in results if not case.passed}
    measured = {name: case for name, case in failed.items() if not case.raised}
    right = {case.name for case in results if case.passed and case.error is not None}
    if UNSTEADY in measured:
        return ["it answers differently from call to call"]
    found = _wrong_widths(measured, right) or wrong_formula(Probe(subject))
    narrow = {dtype_name(dtype) for dtype in HALVES if kept_in(dtype) in found}
    if len(found) == len(narrow):  # the formula is right, and half precision may hide another mistake
        found += _beside_the_formula({name: case for name, case in measured.items() if not case.failed_at <= narrow})
    asked = [case for case in failed.values() if not found or case.group not in ("gradients", "compile")]
    found += [case.note for case in asked if case.raised][:1]
    return found or [f"no mistake known by name; the first case that fails is {next(iter(failed))!r}"]


def _wrong_widths(failures: Failures, right: set[str]) -> list[str]:
    """Name the widths, if the norm is right at width 768 and far off at others: its formula is right."""
    errors = {name: case.error or 0 for name, case in failures.items() if case.group == "widths"}
    is_gross = any(error > GROSS for error in errors.values())
    return _matching(PARTS, errors) if is_gross and "width 768" in right else []


def _beside_the_formula(failures: Failures) -> list[str]:
    """Name symptoms, else parts of the input that are wrong, else gradients: the first table that says something."""
    if found := _matching(SYMPTOMS, failures):
        return found
    wrong = [dtype for dtype in DTYPES if f"{dtype}, ordinary rows" in failures]
    if "float32" in wrong:  # right at no dtype that shows a part
        return []
    rest = {name: case for name, case in failures.items() if not case.failed_at <= set(wrong)}
    of_values = [name for name in rest if not name.startswith("gradients, ")]
    found = _matching(PARTS, of_values) + [f"wrong only for {dtype} input" for dtype in wrong]
    later = (_matching(table, rest) for table in (LAST_PARTS, GRADIENTS, PARTS_OF_GRADIENTS))
    return found or next(filter(None, later), [])


def _matching(parts: dict[str, str], names: Iterable[str]) -> list[str]:
    """Return the sentence of each part that one of these cases belongs to."""
    found = []
    for pattern, said in parts.items():
        before, _, after = pattern.partition("*")
        filled = [name.removeprefix(before).removesuffix(after) for name in names if fnmatchcase(name, pattern)]
        if filled:
            found.append(said.format(", ".join(filled)))
    return found
