"""Cases of behaviour: rows stay independent, inputs stay unchanged, eps and bias hold, and add_norm adds."""

import itertools

import torch
from torch import Tensor

from minigpt.conformance.case import EXACTLY, Case, Measurement, against_truth, same_numbers, worst, worst_element
from minigpt.conformance.rows import ROW_KINDS, far_from_zero, ordinary, transposed
from minigpt.conformance.subject import Candidate, Subject, Unsupported, described
from minigpt.conformance.truth import bound_reason
from minigpt.errors import RAISED
from minigpt.norms.add import parts_of
from minigpt.placement import DTYPES, dtype_name

OTHER_EPS = 1e-3
FLOAT32 = bound_reason(torch.float32)
BOTH = (torch.float32, torch.bfloat16)
HALVES = (torch.bfloat16, torch.float16)


@torch.no_grad()
def row_in_company(subject: Subject, dtype: torch.dtype) -> Measurement:
    return worst({f"width {width}": _company(subject, width, dtype) for width in (64, 768, 1001)})


def _company(subject: Subject, width: int, dtype: torch.dtype) -> Measurement:
    norm, x = subject.candidate(width, dtype), subject.rows(36, width, dtype=dtype)
    order = torch.randperm(36, generator=subject.generator).to(x.device)
    whole = norm(x.clone()).clone()  # a norm may write its next output over this one
    elsewhere = {
        "alone": torch.cat([norm(row.clone()).clone() for row in x.split(1)]),
        "in another place": norm(x[order])[order.argsort()].clone(),
        "among 9": torch.cat([norm(rows.clone()).clone() for rows in x.split(9)]),
        **{f"among {rows:,}": norm(x.repeat(56, 1)[-rows:])[-36:].clone() for rows in (255, 256, 2000)},
    }
    for place, tokens in {"in a prompt": 18, "in pieces of a prompt": 7, "decoded": 1}.items():
        pieces = x.view(2, 18, width).split(tokens, dim=1)
        elsewhere[place] = torch.cat([norm(piece.clone()).clone() for piece in pieces], 1).reshape(36, width)
    bound = norm.truth(x).bound * (0 if _sums_alike(x) else 2)
    return worst({place: worst_element(y, whole.cpu().double(), bound) for place, y in elsewhere.items()})


def _sums_alike(x: Tensor) -> bool:
    """Return True if PyTorch's own mean of a row, on this device, has the same bits alone as among others."""
    x = x.float()
    return torch.equal(torch.cat([row.mean(-1) for row in x.split(1)]), x.mean(-1))


@torch.no_grad()
def input_kept(subject: Subject, dtype: torch.dtype) -> Measurement:
    found = {}
    for shape in ((12, 64), (2, 6, 64), (1, 1, 64)):
        x = subject.rows(*shape, dtype=dtype)
        before = x.clone()
        subject.candidate(64, dtype)(x)
        found[f"shape {shape}"] = same_numbers(x, before)
    return worst(found)


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


@torch.no_grad()
def output_kept(subject: Subject, dtype: torch.dtype) -> Measurement:
    candidate = subject.candidate()
    y = candidate(subject.rows(12, 64, dtype=dtype))
    before = y.clone()
    candidate(subject.rows(12, 64, dtype=dtype))
    return same_numbers(y, before)


@torch.no_grad()
def weights_changed(subject: Subject, dtype: torch.dtype) -> Measurement:
    candidate, x = subject.candidate(64, dtype), subject.rows(12, 64, dtype=dtype)
    candidate(x.clone())
    scale, shift = (parameter.copy_(1 + parameter.flip(0)) for parameter in candidate.parameters.values())
    fresh = subject.candidate(64, dtype, weights=lambda width, generator: (scale.clone(), shift.clone()))
    return same_numbers(candidate(x.clone()), fresh(x.clone()))


def any_mode(subject: Subject, dtype: torch.dtype) -> Measurement:
    candidate, found = subject.candidate(768), {}
    x = subject.rows(3, 4, 768, dtype=dtype)
    modes = {"with gradients": torch.enable_grad, "without": torch.no_grad, "for inference": torch.inference_mode}
    for training, (name, mode) in itertools.product((True, False), modes.items()):
        candidate.module.train(training)
        with mode():
            y = candidate(x.clone().requires_grad_(mode is torch.enable_grad))
        found[f"{'training' if training else 'not training'}, {name}"] = against_truth(candidate, x, y.detach())
    return worst(found)


def another_eps(subject: Subject, dtype: torch.dtype) -> Measurement:
    """A norm that takes no eps is not wrong: other cases tell whether its own eps is GPT-2's."""
    if not subject.takes_eps:
        raise Unsupported("its eps cannot be set")
    x = subject.put(0.05 * ordinary(12, 64, subject.generator), dtype)
    return against_truth(subject.candidate(eps=OTHER_EPS), x)


def no_bias(subject: Subject, dtype: torch.dtype) -> Measurement:
    """A norm that raises without a bias is not judged: every GPT-2 has one."""
    x = subject.rows(12, 64, dtype=dtype)
    try:
        return against_truth(subject.candidate(bias=False), x)
    except RAISED as error:
        raise Unsupported(f"without a bias, {described(error)}") from error


@torch.no_grad()
def autocast(subject: Subject, dtype: torch.dtype) -> Measurement:
    if dtype == torch.float16 and subject.device.type == "cpu":
        raise Unsupported("autocast to float16 is for GPUs")
    is_half = dtype in HALVES
    rows = ordinary(12, 768, subject.generator) if is_half else far_from_zero(12, 768, subject.generator) / 10
    candidate, x = subject.candidate(768), subject.put(rows, dtype)
    with torch.autocast(x.device.type, dtype if is_half else torch.bfloat16):
        y = candidate(x, dtypes=[torch.float32])  # as layer_norm: the input's dtype on a CPU, float32 on CUDA
    found = against_truth(candidate, x, y)
    return found._replace(bound=(1 + is_half) * found.bound)


# Rows, texts, one token of several texts, one token, and a width that no block of a kernel divides
SUM_SHAPES = ((12, 768), (3, 4, 64), (12, 1, 64), (1, 1, 64), (5, 1001))


def residual_added(subject: Subject, dtype: torch.dtype) -> Measurement:
    found = {}
    for shape, delta_dtype, training in itertools.product(SUM_SHAPES, {dtype, torch.bfloat16}, (True, False)):
        candidate = subject.candidate(shape[-1], dtype)
        candidate.module.train(training)
        residual = subject.rows(*shape, dtype=dtype).requires_grad_(training)
        delta = subject.rows(*shape, dtype=delta_dtype)
        given = f"{shape} with a delta in {dtype_name(delta_dtype)}" + ", training" * training
        with torch.set_grad_enabled(training):
            found |= _sum_and_norm(candidate, residual, delta, given)
    residual, delta = (transposed(subject.rows(12, 64, dtype=dtype)) for _ in range(2))
    with torch.no_grad():
        found |= _sum_and_norm(subject.candidate(64, dtype), residual, delta, "transposed rows")
        for kind in ROW_KINDS:
            x = subject.put(kind.rows(12, 64, subject.generator, dtype), dtype)
            found |= _sum_and_norm(subject.candidate(64, dtype, weights=kind.weights), *parts_of(x), kind.name)
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


BEHAVIOUR_CASES = [
    Case("a row in any company", "behaviour",
         "the same bits for a row alone, among 9 to 2,000 rows, in a prompt, in pieces of it, and decoded",
         "a row is computed from itself alone; rounding is allowed only on a device whose own torch.mean sums a row "
         "in another order among others", row_in_company, BOTH),
    Case("input left as it was", "behaviour", "the call does not change its input", EXACTLY, input_kept, BOTH),
    Case("same input, same output", "behaviour", "a second call repeats the first, also after a call with other rows",
         EXACTLY, repeated),
    Case("output left as it was", "behaviour", "the next call does not change an output", EXACTLY, output_kept),
    Case("weights that change", "behaviour",
         "scale and shift change in place between two calls, as in a training step or a load",
         "the numbers must be those of a new norm with these weights", weights_changed, BOTH),
    Case("residual added too", "behaviour",
         "add_norm(residual, delta), if it has one: the exact sum, its norm, and both inputs unchanged",
         "the sum exactly; for its norm the bound of each dtype and kind of row", residual_added,
         tuple(DTYPES.values())),
    Case("any mode", "behaviour", "training or not, with gradients, without, or for inference", FLOAT32, any_mode),
    Case("another eps", "behaviour", f"built with eps={OTHER_EPS:g}", FLOAT32, another_eps),
    Case("no bias", "behaviour", "built with bias=False", FLOAT32, no_bias),
    Case("autocast", "behaviour",
         "under autocast, float32 input stays in float32, and half activations meet float32 weights",
         "the bound of the input's dtype; twice that of half precision, since scale and shift may be rounded to it",
         autocast, (torch.float32, *HALVES)),
]  # fmt: skip
