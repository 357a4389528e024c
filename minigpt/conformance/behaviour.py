"""Cases of behaviour: a row keeps to itself, the input stays, eps and bias are as asked, autocast narrows nothing."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from minigpt.conformance.case import (
    EXACTLY,
    Measurement,
    against_truth,
    case,
    same_numbers,
    worst,
    worst_element,
)
from minigpt.conformance.rows import far_from_zero, ordinary
from minigpt.conformance.settings import (
    AUTOCAST,
    SETTINGS,
    changed_settings,
    set_autocast,
    settings,
    settings_kept,
)
from minigpt.conformance.subject import EPS, OTHER_EPS, Candidate, Mismatch, Subject, Unsupported
from minigpt.conformance.sums import SUM_CASES
from minigpt.conformance.truth import PRECISIONS, bound_reason
from minigpt.placement import dtype_name

ROUNDING, CHANGES = "by rounding alone", "it changes "  # in a note, and at the beginning of one
FLOAT32 = bound_reason(torch.float32)


@case(
    "a row in any company",
    "behaviour",
    tests="a row alone, among 9 or 2,000, at any place: the same bits",
    reason="a row is computed from itself alone; rounding is allowed only on a device whose own torch.mean sums a row "
    "in another order among others",
)
@torch.no_grad()
def row_in_company(subject: Subject) -> Measurement:
    found = {
        f"{dtype_name(dtype)} of width {width}": _company(subject, width, dtype)
        for dtype in (torch.float32, torch.bfloat16)
        for width in (64, 768, 1001)
    }
    beyond_rounding = {name: one for name, one in found.items() if one.error and ROUNDING not in one.note}
    return worst(beyond_rounding or found)


def _company(subject: Subject, width: int, dtype: torch.dtype) -> Measurement:
    candidate = subject.candidate(width, dtype)
    x = subject.rows(36, width, dtype=dtype)
    return worst({f"a row{way}": _in_company(subject, candidate, ask, x) for way, ask in candidate.ways().items()})


def _in_company(subject: Subject, candidate: Candidate, ask: Callable[[Tensor], Tensor], x: Tensor) -> Measurement:
    width, dtype = x.shape[-1], x.dtype
    order = torch.randperm(36, generator=subject.generator).to(x.device)
    whole = ask(x.clone()).clone()  # of one that writes its next output over it, too
    elsewhere = {
        "alone": torch.cat([ask(row.clone()).clone() for row in x.split(1)]),
        "in another place": ask(x[order])[order.argsort()].clone(),
        "among 9": torch.cat([ask(rows.clone()).clone() for rows in x.split(9)]),
        "among 2,000": ask(x.repeat(56, 1))[-36:].clone(),
        "as tokens": ask(x.clone().view(2, 18, width)).reshape(36, width).clone(),
    }
    expected = whole.cpu().double()
    reach = expected.abs() + candidate.truth(torch.zeros_like(x)).values.abs()  # what was scaled, before its shift too
    bound = 2 * candidate.truth(x).bound + 4 * PRECISIONS[dtype].result * reach  # rounding of a wrong formula as well
    rounded = worst({place: worst_element(y, expected, bound) for place, y in elsewhere.items()})
    if not _sums_alike(x):
        return rounded
    found = worst({place: same_numbers(y, whole) for place, y in elsewhere.items()})
    return found._replace(note=f"{ROUNDING}, {found.note}") if found.error and rounded.within else found


def _sums_alike(x: Tensor) -> bool:
    """Whether PyTorch's own mean of a row, on this device, has the same bits alone as among others."""
    x = x.float()
    return torch.equal(torch.cat([row.mean(-1) for row in x.split(1)]), x.mean(-1))


@case("input left as it was", "behaviour", tests="the input after the call is the input before it", reason=EXACTLY)
@torch.no_grad()
def input_kept(subject: Subject) -> Measurement:
    found = {}
    shapes = ((12, 64), (2, 6, 64), (1, 1, 64), (12, 1, 64))
    for dtype, shape in itertools.product((torch.float32, torch.bfloat16), shapes):
        x = subject.rows(*shape, dtype=dtype)
        before = x.clone()
        subject.candidate(64, dtype)(x)
        found[f"{dtype_name(dtype)} of shape {shape}"] = same_numbers(x, before)
    return worst(found)


@case(
    "same input, same output",
    "behaviour",
    tests="a second call repeats the first, and so does the same norm after a call with other rows",
    reason=EXACTLY,
)
@torch.no_grad()
def repeated(subject: Subject) -> Measurement:
    candidate, again = (subject.drawing_for("the same weights").candidate(768) for _ in range(2))
    x, other = (subject.rows(12, 768) for _ in range(2))
    first = candidate(x.clone()).clone()
    again(other)
    return worst(
        {
            "the second call": same_numbers(candidate(x.clone()), first),
            "the call after other rows": same_numbers(again(x.clone()), first),
        }
    )


@case("output left as it was", "behaviour", tests="an output after the next call", reason=EXACTLY)
@torch.no_grad()
def output_kept(subject: Subject) -> Measurement:
    candidate = subject.candidate(64)
    x, other = (subject.rows(12, 64) for _ in range(2))
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
    tests="scale and shift changed in place between two calls, as an optimizer's step or a load changes them",
    reason="for each dtype the bound of its ordinary rows",
)
@torch.no_grad()
def weights_changed(subject: Subject) -> Measurement:
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        candidate, x = subject.candidate(64, dtype), subject.rows(12, 64, dtype=dtype)
        if not _is_right(candidate, x):
            raise Unsupported("it is wrong before they change")
        for parameter in candidate.parameters.values():
            parameter.copy_(1 + parameter.flip(0))
        for way, ask in candidate.ways().items():
            found[f"{dtype_name(dtype)}{way}"] = against_truth(candidate, x, ask(x.clone()))
        if not _is_right_from_the_start(subject, candidate, x):
            raise Unsupported("it is wrong with such weights from the start")
    return worst(found)


def _is_right_from_the_start(subject: Subject, candidate: Candidate, x: Tensor) -> bool:
    """Whether a norm that has never had other weights than these is right."""
    scale, shift = (parameter.detach().cpu().double() for parameter in candidate.parameters.values())
    fresh = subject.candidate(64, x.dtype, weights=lambda width, generator: (scale, shift))
    return _is_right(fresh, x)


def _is_right(candidate: Candidate, x: Tensor) -> bool:
    return all(against_truth(candidate, x, ask(x.clone())).within for ask in candidate.ways().values())


@case(
    "settings left as they were",
    "behaviour",
    tests=f"what holds for the whole process, after a call as before it: {', '.join(SETTINGS)}",
    reason=EXACTLY,
)
def settings_left(subject: Subject) -> Measurement:
    """Set to something first: an earlier call has left them as the norm wants them."""
    candidate = subject.candidate(64)
    x = subject.rows(12, 64)
    with settings_kept():
        for gradients, ask in itertools.product((True, False), candidate.ways().values()):
            torch.default_generator.manual_seed(123456789)
            torch.set_default_dtype(torch.float32)
            torch.set_grad_enabled(gradients)
            set_autocast([False for _ in AUTOCAST])
            before = settings()
            ask(x.clone())
            if changed := changed_settings(before):
                raise Mismatch(f"{CHANGES}{' and '.join(changed)}, for everybody in the process")
    return Measurement(0.0, 0.0)


@case("any mode", "behaviour", tests="training or not, with gradients, without, or for inference", reason=FLOAT32)
def any_mode(subject: Subject) -> Measurement:
    candidate, found = subject.candidate(768), {}
    x = subject.rows(3, 4, 768)
    modes = {"with gradients": torch.enable_grad, "without": torch.no_grad, "for inference": torch.inference_mode}
    for training, (name, mode) in itertools.product((True, False), modes.items()):
        candidate.module.train(training)
        with mode():
            y = candidate(x.clone())
        found[f"{'training' if training else 'not training'}, {name}"] = against_truth(candidate, x, y.detach())
    return worst(found)


@case("another eps", "behaviour", tests=f"built with eps={OTHER_EPS:g}", reason=FLOAT32)
def another_eps(subject: Subject) -> Measurement:
    """A norm that takes no eps is no mistake: other cases tell whether it has GPT-2's."""
    if not subject.takes_eps:
        raise Unsupported("its eps cannot be set")
    candidate = subject.candidate(64, eps=OTHER_EPS)
    x = subject.put(0.05 * ordinary(12, 64, subject.generator))
    found = against_truth(candidate, x)
    fixed = Candidate(candidate.module, candidate.weight, candidate.bias, EPS)
    if not found.within and against_truth(fixed, x).within:
        return found._replace(note=f"it has eps={EPS:g} whatever it is given")
    return found


@case("no bias", "behaviour", tests="built with bias=False", reason=FLOAT32)
def no_bias(subject: Subject) -> Measurement:
    candidate, x = subject.without_bias(64), subject.rows(12, 64)
    return worst({f"it{way}": against_truth(candidate, x, ask(x.clone())) for way, ask in candidate.ways().items()})


@case("autocast, float32 input", "behaviour", tests="under autocast, float32 input stays in float32", reason=FLOAT32)
def autocast_float32(subject: Subject) -> Measurement:
    candidate = subject.candidate(768)
    x = subject.put(far_from_zero(12, 768, subject.generator) / 10)
    return worst({dtype_name(dtype): _under_autocast(candidate, x, dtype) for dtype in _autocast_dtypes(subject)})


@case(
    "autocast, half input",
    "behaviour",
    tests="under autocast, half activations meet float32 weights",
    reason="twice the bound of the input's dtype, since scale and shift may be rounded to it too",
)
def autocast_half(subject: Subject) -> Measurement:
    candidate = subject.candidate(768)
    rows = ordinary(12, 768, subject.generator)
    halves = {dtype: subject.put(rows, dtype) for dtype in _autocast_dtypes(subject)}
    found = worst({dtype_name(dtype): _under_autocast(candidate, x, dtype) for dtype, x in halves.items()})
    return found._replace(bound=2 * found.bound)


@torch.no_grad()
def _under_autocast(candidate: Candidate, x: Tensor, dtype: torch.dtype) -> Measurement:
    with torch.autocast(x.device.type, dtype):
        y = candidate(x, dtypes=(x.dtype, torch.float32))  # as layer_norm: the input's dtype on a CPU, float32 on CUDA
    return against_truth(candidate, x, y)


def _autocast_dtypes(subject: Subject) -> tuple[torch.dtype, ...]:
    return (torch.bfloat16,) if subject.device.type == "cpu" else (torch.bfloat16, torch.float16)


BEHAVIOUR_CASES = [
    row_in_company,
    input_kept,
    repeated,
    output_kept,
    weights_changed,
    settings_left,
    *SUM_CASES,
    any_mode,
    another_eps,
    no_bias,
    autocast_float32,
    autocast_half,
]
