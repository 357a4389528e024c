"""From failed cases to the name of the mistake. Inputs and outputs say it; no source code is read.

A formula is named if it gives the norm's numbers at every probe: another rank, another width. If it gives them at some
probes, the diagnosis says at which. If nothing fits, it says which inputs are right, which are wrong, and by how much.
"""

import contextlib
import math
from collections.abc import Callable, Iterator

import torch

from minigpt.conformance import backward, behaviour, cases, probes
from minigpt.conformance.case import Axis, CaseResult, Compare, judged_at
from minigpt.conformance.compare import Kind
from minigpt.conformance.found import (
    MOST_PATTERNS,
    UNKNOWN,
    Mistakes,
    Results,
    first_dtype,
    listed_values,
    of_cases,
    of_numbers,
    on_axis,
    without_gradients,
    wrong_at,
)
from minigpt.conformance.rounding import otherwise_rounded
from minigpt.conformance.subject import Subject
from minigpt.conformance.truth import FAR_FROM_ZERO, ORDINARY
from minigpt.machine import one_thread
from minigpt.norms.formulas import GPT2_EPS
from minigpt.precision import DTYPES, HALVES

FAR = 100  # times the bound is no accident

# The mistakes that a behaviour shows, by what compares it
UNSTEADY = {
    behaviour.repeated: "it answers differently from call to call",
    behaviour.repeated_in_training: "it answers differently from call to call, in training",
    behaviour.many_calls: "it is right for the first calls, and wrong later",
    behaviour.calls_independent: "it remembers an earlier input",
}
CALLS = {
    behaviour.input_kept: "it modifies its input",
    behaviour.output_kept: "its next call writes over its output",
    behaviour.weights_changed: "it keeps its weights: it computes with them after they have changed",
    behaviour.incoming_kept: "its backward pass changes the incoming gradient",
    behaviour.overlapping: "its backward pass uses what a later call left",
    behaviour.backward_twice: "its backward pass is right once, and wrong when it is repeated",
}
INPUTS = {
    cases.not_finite: "wrong only where a row holds an infinity or a NaN",
    behaviour.any_mode: "its values depend on training mode, or on whether gradients are kept",
    behaviour.rows_independent: "a row depends on its batch",
}
OF_SETTINGS = {
    behaviour.no_bias: "wrong only without a bias",
    behaviour.autocast: "wrong only under autocast",
    behaviour.another_eps: f"wrong with another eps than {GPT2_EPS:g}, as if the argument were ignored",
    cases.compiled_values: "it differs under torch.compile",
}
ROUNDINGS = {cases.roundings: "it rounds otherwise than once, or before the weight multiplies the row and after"}
SLOPE = {cases.bias_and_slope: "its errors have a bias, or its rows are too long or too short"}
CANCELS = "wrong only for mean far from 0, where a difference of squares, E[x^2] - E[x]^2, cancels"


@one_thread()
def diagnoses(subject: Subject, results: Results) -> list[tuple[str, frozenset[str]]]:
    """Return what is wrong with a norm that failed some of these cases, most important first; at least one.

    Each is a sentence, and the names of the dtypes that show it; none if all do.
    """
    judged = judged_at(results)
    diagnoses: list[tuple[str, frozenset[str]]] = []
    for sentence, dtypes in seen_mistakes(subject, results):
        if not dtypes or dtypes == judged:
            diagnoses.append((sentence, frozenset()))
            continue
        at = _in_words(dtypes)
        if f" {at}" not in sentence:
            sentence = f"{sentence}, at {at}"
        diagnoses.append((sentence, frozenset(dtypes)))
    return diagnoses


def _in_words(dtypes: set[str]) -> str:
    *first, last = sorted(dtypes)
    if not first:
        return last
    return f"{', '.join(first)} and {last}"


def seen_mistakes(subject: Subject, results: Results) -> Mistakes:
    """Return the mistakes of a norm: of its calls, its outputs and its gradients, and what it raises."""
    wrong = [case for case in results if case.wrong_at]
    of_calls = _behaviours(wrong)
    for compare, sentence in UNSTEADY.items():
        if compare in of_calls:
            return [(sentence, of_calls[compare].wrong_at)]  # it has no formula
    mistakes, rest = [], list(wrong)
    for compare, sentence in CALLS.items():
        if compare in of_calls:
            mistakes.append((sentence, of_calls[compare].wrong_at))
            rest.remove(of_calls[compare])
    mistakes += _of_values(subject, rest, results, is_called_wrongly=bool(mistakes))
    mistakes += _raised(results, mistakes)
    return mistakes or [(f"{UNKNOWN}: the first case that fails is {rest[0].summary}", set())]


def _behaviours(wrong: Results) -> dict[Compare, CaseResult]:
    """Return the behaviours that are wrong, by what compares them. A NaN shows nothing."""
    behaviours = {}
    for case in on_axis(wrong, Axis.BEHAVIOUR):
        if not math.isnan(case.worst_measured.error or 0):
            behaviours[case.compare] = case
    return behaviours


def _raised(results: Results, mistakes: Mistakes) -> Mistakes:
    """Return what the norm raises first, if it is no consequence of these mistakes."""
    for case in results:
        raised = case.notes_at(Kind.RAISED)
        if raised and not _is_consequence(case, {*raised}, mistakes):
            return [(next(iter(raised.values())), {*raised})]
    return []


def _is_consequence(case: CaseResult, at: set[str], mistakes: Mistakes) -> bool:
    """Return True for gradients that raise after another mistake, and for another dtype out after one at this dtype."""
    if case.compare is behaviour.mixed_precision:
        explained = set[str]()
        for _, dtypes in mistakes:
            explained |= dtypes or DTYPES.keys()
        return at <= explained
    return bool(mistakes) and case.group in ("gradients", "compile")


def first_answer(answers: Iterator[Mistakes]) -> Mistakes:
    """Return the first answer that names a mistake; none if no answer does."""
    return next(filter(None, answers), [])


def _of_values(subject: Subject, failed: Results, results: Results, *, is_called_wrongly: bool) -> Mistakes:
    """Return the mistakes of outputs and gradients: of all rows where ordinary ones are wrong, else of some inputs."""
    ordinary_at = wrong_at([case for case in failed if case.name == ORDINARY.name])
    if "float32" in ordinary_at:
        return of_outputs(subject, "float32", failed, results)
    mistakes: Mistakes = []
    others = []
    for case in failed:
        other = case.without(ordinary_at)
        if other.wrong_at:
            others.append(other)
    if others and not is_called_wrongly:
        mistakes += of_some_inputs(subject, others, results)
    for dtype in DTYPES:
        if dtype in ordinary_at:
            mistakes += of_outputs(subject, dtype, failed, results)
    return mistakes


# --- Some inputs ---


def of_some_inputs(subject: Subject, failed: Results, results: Results) -> Mistakes:
    """Return what is wrong with a norm whose ordinary rows are right: gradients, a formula, or some inputs."""
    values = [case for case in failed if case.group not in ("gradients", "compile")]
    if not values:
        mistakes = backward.mistakes_of_gradients(subject, failed, results)
        if mistakes:
            return mistakes
    at, patterns = wrong_at(failed), values or failed
    kinds = on_axis(patterns, Axis.KIND)
    is_far_alone = [case.value for case in kinds] == [FAR_FROM_ZERO.name]
    with contextlib.suppress(Exception):
        sentences = probes.agreed(subject.drawing_for("diagnosis"), first_dtype(at))
        mistakes = [(sentence, at) for sentence in sentences] or _of_roundings(subject, at)
        if mistakes:
            return mistakes

    # most mistakes of one table fail the cases of the next, so the first one counts
    def answers() -> Iterator[Mistakes]:
        if is_far_alone:
            yield [of_cases(CANCELS, kinds)]
        yield _of_inputs(patterns, results)
        yield _of_behaviours(patterns, OF_SETTINGS)
        yield _of_behaviours(patterns, ROUNDINGS)
        yield _of_behaviours(patterns, SLOPE)

    return first_answer(answers())[:MOST_PATTERNS]


def _of_roundings(subject: Subject, at: set[str]) -> Mistakes:
    """Return where a norm rounds that is wrong in half precision alone."""
    halves = [dtype for dtype in DTYPES if DTYPES[dtype] in HALVES]
    mistakes: Mistakes = []
    if at <= set(halves):
        for dtype in sorted(at, key=halves.index):
            for sentence in otherwise_rounded(subject.drawing_for("diagnosis"), DTYPES[dtype]):
                mistakes.append((sentence, {dtype}))
    return mistakes


def _of_inputs(failed: Results, results: Results) -> Mistakes:
    """Return for which widths, sizes, shapes, strides and rows a norm is wrong."""
    mistakes = of_numbers(failed, without_gradients(results))
    mistakes += _together("wrong only for {} input", failed, Axis.SHAPE)
    mistakes += _together("wrong only for non-contiguous input: {}", failed, Axis.STRIDES)
    for case in on_axis(failed, Axis.KIND):
        mistakes.append(of_cases(f"wrong only for {case.value}", [case]))
    return mistakes + _of_behaviours(failed, INPUTS)


def _together(sentence: str, failed: Results, axis: Axis) -> Mistakes:
    shown = on_axis(failed, axis)
    if not shown:
        return []
    return [of_cases(sentence.format(listed_values(shown)), shown)]


def _of_behaviours(failed: Results, sentences: dict[Compare, str]) -> Mistakes:
    behaviours = {case.compare: case for case in on_axis(failed, Axis.BEHAVIOUR)}
    mistakes = []
    for compare, sentence in sentences.items():
        if compare in behaviours:
            mistakes.append(of_cases(sentence, [behaviours[compare]]))
    return mistakes


# --- All outputs ---


def of_outputs(subject: Subject, name: str, failed: Results, results: Results) -> Mistakes:
    """Return what is wrong with a norm whose ordinary rows are wrong at the dtype of this name."""
    dtype = DTYPES[name]
    subject = subject.drawing_for("diagnosis")
    at = set() if name == "float32" else {name}  # float32's mistake is the norm's
    here = [case for case in failed if name in case.wrong_at]
    shown = [case for case in here if case.name == ORDINARY.name]
    worst = shown[0].outcomes[name]

    def answers() -> Iterator[Mistakes]:
        yield answers_of(probes.agreed)
        if dtype in HALVES:
            yield answers_of(otherwise_rounded)
        yield answers_of(probes.reciprocal)
        yield answers_of(probes.precision)
        if worst.place and worst.ratio > FAR:
            yield [of_cases("some rows or columns are wrong", shown)]
        yield answers_of(probes.structure)
        yield _of_ranks_and_sizes(here, [case for case in results if name in case.dtypes])
        yield answers_of(probes.symptoms)

    def answers_of(probe: Callable[[Subject, torch.dtype], list[str]]) -> Mistakes:
        return [(sentence, at) for sentence in probe(subject, dtype)]

    mistakes: Mistakes = []
    with contextlib.suppress(Exception):
        mistakes = first_answer(answers())
    if mistakes:
        return mistakes
    where = ", ".join(filter(None, (worst.note, worst.place)))
    return [(f"{UNKNOWN}: its values are off by {worst.error:.2g}, {where}", at)]


def _of_ranks_and_sizes(failed: Results, results: Results) -> Mistakes:
    """Return at which widths, sizes or ranks a norm is wrong, if it is right at a quarter of them at least."""
    mistakes: Mistakes = []
    judged = {case.value for case in on_axis(results, Axis.SHAPE)} & set(cases.RANKS)
    ranks = [case for case in on_axis(failed, Axis.SHAPE) if case.value in cases.RANKS]
    if 0 < len(ranks) < len(judged):
        mistakes.append(of_cases(f"wrong only for {listed_values(ranks)} input", ranks))
    return mistakes + of_numbers(without_gradients(failed), without_gradients(results), least=0.25)
