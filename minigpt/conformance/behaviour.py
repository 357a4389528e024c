"""Cases of behaviour: rows stay independent, inputs stay unchanged, eps and bias hold, and add_norm adds."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from minigpt.conformance.case import (
    EXACTLY,
    ROUNDING,
    Measurement,
    against_truth,
    case,
    require_as_finite,
    same_numbers,
    worst,
    worst_element,
)
from minigpt.conformance.rows import ROW_KINDS, far_from_zero, ordinary, transposed, with_no_numbers
from minigpt.conformance.subject import EPS, OTHER_EPS, Candidate, Mismatch, Subject, Unsupported
from minigpt.conformance.truth import PRECISIONS, bound_reason
from minigpt.conformance.values import LAYOUTS
from minigpt.measure.settings import AUTOCAST, SETTINGS, changed_settings, set_autocast, settings, settings_kept
from minigpt.norms.add import parts_of
from minigpt.placement import DTYPES, dtype_name

CHANGES = "it changes "  # begins the note of a norm that changes PyTorch's settings
FLOAT32 = bound_reason(torch.float32)
BOTH = (torch.float32, torch.bfloat16)


@case(
    "a row in any company",
    "behaviour",
    tests="a row alone, among 9 or 2,000, at any place: the same bits",
    reason="a row is computed from itself alone; rounding is allowed only on a device whose own torch.mean sums a row "
    "in another order among others",
    dtypes=BOTH,
)
@torch.no_grad()
def row_in_company(subject: Subject, dtype: torch.dtype) -> Measurement:
    return worst({f"width {width}": _company(subject, width, dtype) for width in (64, 768, 1001)})


def _company(subject: Subject, width: int, dtype: torch.dtype) -> Measurement:
    candidate = subject.candidate(width, dtype)
    x = subject.rows(36, width, dtype=dtype)
    return worst({f"a row{way}": _in_company(subject, candidate, ask, x) for way, ask in candidate.ways().items()})


def _in_company(subject: Subject, candidate: Candidate, ask: Callable[[Tensor], Tensor], x: Tensor) -> Measurement:
    width, dtype = x.shape[-1], x.dtype
    order = torch.randperm(36, generator=subject.generator).to(x.device)
    whole = ask(x.clone()).clone()  # a norm may write its next output over this one
    elsewhere = {
        "alone": torch.cat([ask(row.clone()).clone() for row in x.split(1)]),
        "in another place": ask(x[order])[order.argsort()].clone(),
        "among 9": torch.cat([ask(rows.clone()).clone() for rows in x.split(9)]),
        "among 2,000": ask(x.repeat(56, 1))[-36:].clone(),
        "as tokens": ask(x.clone().view(2, 18, width)).reshape(36, width).clone(),
    }
    expected = whole.cpu().double()
    reach = expected.abs() + candidate.truth(torch.zeros_like(x)).values.abs()  # what was scaled, before its shift too
    bound = 2 * candidate.truth(x).bound + 4 * PRECISIONS[dtype].result * reach  # holds for a wrong formula as well
    rounded = worst({place: worst_element(y, expected, bound) for place, y in elsewhere.items()})
    if not _sums_alike(x):
        return rounded
    found = worst({place: same_numbers(y, whole) for place, y in elsewhere.items()})
    return found._replace(note=f"{ROUNDING}, {found.note}") if found.error and rounded.within else found


def _sums_alike(x: Tensor) -> bool:
    """Return True if PyTorch's own mean of a row, on this device, has the same bits alone as among others."""
    x = x.float()
    return torch.equal(torch.cat([row.mean(-1) for row in x.split(1)]), x.mean(-1))


@case("input left as it was", "behaviour", tests="the call does not change its input", reason=EXACTLY, dtypes=BOTH)
@torch.no_grad()
def input_kept(subject: Subject, dtype: torch.dtype) -> Measurement:
    found = {}
    for shape in ((12, 64), (2, 6, 64), (1, 1, 64), (12, 1, 64)):
        x = subject.rows(*shape, dtype=dtype)
        before = x.clone()
        subject.candidate(64, dtype)(x)
        found[f"shape {shape}"] = same_numbers(x, before)
    return worst(found)


@case(
    "same input, same output",
    "behaviour",
    tests="a second call repeats the first, also after a call with other rows",
    reason=EXACTLY,
)
@torch.no_grad()
def repeated(subject: Subject, dtype: torch.dtype) -> Measurement:
    candidate, again = (subject.drawing_for("the same weights").candidate(768) for _ in range(2))
    x, other = (subject.rows(12, 768, dtype=dtype) for _ in range(2))
    first = candidate(x.clone()).clone()
    again(other)
    return worst(
        {
            "the second call": same_numbers(candidate(x.clone()), first),
            "the call after other rows": same_numbers(again(x.clone()), first),
        }
    )


@case("output left as it was", "behaviour", tests="the next call does not change an output", reason=EXACTLY)
@torch.no_grad()
def output_kept(subject: Subject, dtype: torch.dtype) -> Measurement:
    candidate = subject.candidate(64)
    x, other = (subject.rows(12, 64, dtype=dtype) for _ in range(2))
    found = {}
    for way, ask in candidate.ways().items():
        y = ask(x)
        before = y.clone()
        ask(other)
        found[f"the output{way}"] = same_numbers(y, before)
    return worst(found)


@case(
    "weights that change",
    "behaviour",
    tests="scale and shift change in place between two calls, as in a training step or a load",
    reason="for each dtype the bound of its ordinary rows",
    dtypes=BOTH,
)
@torch.no_grad()
def weights_changed(subject: Subject, dtype: torch.dtype) -> Measurement:
    candidate, x = subject.candidate(64, dtype), subject.rows(12, 64, dtype=dtype)
    if not _is_right(candidate, x):
        raise Unsupported("it is wrong before they change")
    for parameter in candidate.parameters.values():
        parameter.copy_(1 + parameter.flip(0))
    found = {f"it{way}": against_truth(candidate, x, ask(x.clone())) for way, ask in candidate.ways().items()}
    if not _is_right_from_the_start(subject, candidate, x):
        raise Unsupported("it is wrong with such weights from the start")
    return worst(found)


def _is_right_from_the_start(subject: Subject, candidate: Candidate, x: Tensor) -> bool:
    """Return True if a new norm that is built with these weights is right."""
    scale, shift = (parameter.detach().cpu().double() for parameter in candidate.parameters.values())
    fresh = subject.candidate(64, x.dtype, weights=lambda width, generator: (scale, shift))
    return _is_right(fresh, x)


def _is_right(candidate: Candidate, x: Tensor) -> bool:
    return all(against_truth(candidate, x, ask(x.clone())).within for ask in candidate.ways().values())


@case(
    "settings left as they were",
    "behaviour",
    tests=f"a call does not change the settings of the process: {', '.join(SETTINGS)}",
    reason=EXACTLY,
)
def settings_left(subject: Subject, dtype: torch.dtype) -> Measurement:
    candidate = subject.candidate(64)
    x = subject.rows(12, 64, dtype=dtype)
    with settings_kept():
        for gradients, ask in itertools.product((True, False), candidate.ways().values()):
            torch.default_generator.manual_seed(123456789)  # an earlier call may have left what the norm sets
            torch.set_default_dtype(torch.float32)
            torch.set_grad_enabled(gradients)
            set_autocast([False for _ in AUTOCAST])
            before = settings()
            ask(x.clone())
            if changed := changed_settings(before):
                raise Mismatch(f"{CHANGES}{' and '.join(changed)}, for the whole process")
    return Measurement(0.0, 0.0)


@case("any mode", "behaviour", tests="training or not, with gradients, without, or for inference", reason=FLOAT32)
def any_mode(subject: Subject, dtype: torch.dtype) -> Measurement:
    candidate, found = subject.candidate(768), {}
    x = subject.rows(3, 4, 768, dtype=dtype)
    modes = {"with gradients": torch.enable_grad, "without": torch.no_grad, "for inference": torch.inference_mode}
    for training, (name, mode) in itertools.product((True, False), modes.items()):
        candidate.module.train(training)
        with mode():
            y = candidate(x.clone())
        found[f"{'training' if training else 'not training'}, {name}"] = against_truth(candidate, x, y.detach())
    return worst(found)


@case("another eps", "behaviour", tests=f"built with eps={OTHER_EPS:g}", reason=FLOAT32)
def another_eps(subject: Subject, dtype: torch.dtype) -> Measurement:
    """A norm that takes no eps is not wrong: other cases tell whether its own eps is GPT-2's."""
    if not subject.takes_eps:
        raise Unsupported("its eps cannot be set")
    candidate = subject.candidate(64, eps=OTHER_EPS)
    x = subject.put(0.05 * ordinary(12, 64, subject.generator), dtype)
    found = against_truth(candidate, x)
    fixed = Candidate(candidate.module, candidate.weight, candidate.bias, EPS)
    if not found.within and against_truth(fixed, x).within:
        return found._replace(note=f"its eps is {EPS:g} whatever eps it gets")
    return found


@case("no bias", "behaviour", tests="built with bias=False", reason=FLOAT32)
def no_bias(subject: Subject, dtype: torch.dtype) -> Measurement:
    candidate, x = subject.without_bias(64), subject.rows(12, 64, dtype=dtype)
    return worst({f"it{way}": against_truth(candidate, x, ask(x.clone())) for way, ask in candidate.ways().items()})


@case("autocast, float32 input", "behaviour", tests="under autocast, float32 input stays in float32", reason=FLOAT32)
def autocast_float32(subject: Subject, dtype: torch.dtype) -> Measurement:
    candidate = subject.candidate(768)
    x = subject.put(far_from_zero(12, 768, subject.generator) / 10, dtype)
    return worst({dtype_name(half): _under_autocast(candidate, x, half) for half in _autocast_dtypes(subject)})


@case(
    "autocast, half input",
    "behaviour",
    tests="under autocast, half activations meet float32 weights",
    reason="twice the bound of the input's dtype, since scale and shift may be rounded to it too",
    dtypes=(torch.bfloat16, torch.float16),
)
def autocast_half(subject: Subject, dtype: torch.dtype) -> Measurement:
    if dtype not in _autocast_dtypes(subject):
        raise Unsupported(f"autocast to {dtype_name(dtype)} is for GPUs")
    x = subject.put(ordinary(12, 768, subject.generator), dtype)
    found = _under_autocast(subject.candidate(768), x, dtype)
    return found._replace(bound=2 * found.bound)


@torch.no_grad()
def _under_autocast(candidate: Candidate, x: Tensor, dtype: torch.dtype) -> Measurement:
    with torch.autocast(x.device.type, dtype):
        y = candidate(x, dtypes=(x.dtype, torch.float32))  # as layer_norm: the input's dtype on a CPU, float32 on CUDA
    return against_truth(candidate, x, y)


def _autocast_dtypes(subject: Subject) -> tuple[torch.dtype, ...]:
    return (torch.bfloat16,) if subject.device.type == "cpu" else (torch.bfloat16, torch.float16)


# Rows, texts, one token of several texts, one token, and a width that no block of a kernel divides
SUM_SHAPES = ((12, 768), (3, 4, 64), (12, 1, 64), (1, 1, 64), (5, 1001))


@case(
    "residual added too",
    "behaviour",
    tests="add_norm(residual, delta), if it has one: the exact sum, its norm, and both inputs unchanged",
    reason="the sum exactly; for its norm the bound of ordinary rows of that dtype",
    dtypes=BOTH,
)
@torch.no_grad()
def residual_added(subject: Subject, dtype: torch.dtype) -> Measurement:
    found = {}
    for shape, delta_dtype, training in itertools.product(SUM_SHAPES, {dtype, torch.bfloat16}, (True, False)):
        candidate = subject.candidate(shape[-1], dtype)
        candidate.module.train(training)
        residual, delta = subject.rows(*shape, dtype=dtype), subject.rows(*shape, dtype=delta_dtype)
        given = f"{shape} with a delta in {dtype_name(delta_dtype)}" + ", training" * training
        found |= _sum_and_norm(candidate, residual, delta, given)
        if len(shape) == 2:
            found |= _sum_and_norm(candidate, transposed(residual), transposed(delta), f"{given}, transposed")
    return worst(found)


@case(
    "residual added too, hard rows",
    "behaviour",
    tests="add_norm of every kind of row at every dtype, in every layout, and built with another eps",
    reason="for each dtype and kind its own bound",
    dtypes=tuple(DTYPES.values()),
)
@torch.no_grad()
def residual_of_hard_rows(subject: Subject, dtype: torch.dtype) -> Measurement:
    found = {}
    for kind in ROW_KINDS:
        candidate = subject.candidate(64, dtype, weights=kind.weights)
        x = subject.put(kind.rows(12, 64, subject.generator, dtype), dtype)
        found |= _sum_and_norm(candidate, *parts_of(x), kind.name)
    if dtype != torch.float32:
        return worst(found)
    for name, lay in LAYOUTS.items():
        residual, delta = (lay(subject.rows(12, 64)) for _ in range(2))
        found |= _sum_and_norm(subject.candidate(64), residual, delta, f"rows that are {name}")
    if subject.takes_eps:
        x = subject.put(0.05 * ordinary(12, 64, subject.generator))
        found |= _sum_and_norm(subject.candidate(64, eps=OTHER_EPS), *parts_of(x), f"rows with eps={OTHER_EPS:g}")
    return worst(found)


def _sum_and_norm(candidate: Candidate, residual: Tensor, delta: Tensor, given: str) -> dict[str, Measurement]:
    before, expected = (residual.clone(), delta.clone()), residual + delta
    total, y = candidate.add_norm(residual, delta)
    return {
        f"the residual after it, {given}": same_numbers(residual, before[0]),
        f"the delta after it, {given}": same_numbers(delta, before[1]),
        f"the sum of {given}": same_numbers(total, expected),
        f"the norm of {given}": against_truth(candidate, expected, y),
    }


@case(
    "residual added too, not finite",
    "behaviour",
    tests="a row of the residual that is not finite stays so in add_norm, as with layer_norm",
    reason="the other rows must have the same bits as without it",
)
@torch.no_grad()
def residual_spoilt(subject: Subject, dtype: torch.dtype) -> Measurement:
    candidate = subject.candidate(64)
    residual, delta = (subject.rows(6, 64, dtype=dtype) for _ in range(2))
    spoilt = with_no_numbers(residual)
    _, clean = candidate.add_norm(residual, delta.clone())
    _, y = candidate.add_norm(spoilt.clone(), delta.clone())
    require_as_finite(y, candidate.reference(spoilt + delta), hiding=True)
    return same_numbers(y[[0, 2, 5]], clean[[0, 2, 5]])


BEHAVIOUR_CASES = [
    row_in_company,
    input_kept,
    repeated,
    output_kept,
    weights_changed,
    settings_left,
    residual_added,
    residual_of_hard_rows,
    residual_spoilt,
    any_mode,
    another_eps,
    no_bias,
    autocast_float32,
    autocast_half,
]
