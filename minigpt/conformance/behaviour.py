"""Cases of behaviour: rows stay independent, inputs stay unchanged, eps and bias hold, and add_norm adds.

The docstring of a measure is what the report says that it tests.
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from minigpt.conformance.case import EXACTLY, Case, Measurement, against_truth, same_numbers, worst, worst_element
from minigpt.conformance.cases import FLOAT32, Given
from minigpt.conformance.rows import ORDINARY, ROW_KINDS, far_from_zero, ordinary, transposed
from minigpt.conformance.subject import Candidate, Subject, Unsupported, described
from minigpt.errors import RAISED
from minigpt.norms.add import parts_of
from minigpt.placement import DTYPES, dtype_name
from minigpt.processor import HALVES

OTHER_EPS = 1e-3
BOTH = (torch.float32, torch.bfloat16)
BEHAVIOUR_CASES: list[Case] = []

Measure = Callable[[Subject, torch.dtype], Measurement]


def case(name: str, reason: str, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> Callable[[Measure], Measure]:
    """Decorate a function that measures the answer to this question."""

    def add(measure: Measure) -> Measure:
        BEHAVIOUR_CASES.append(Case(name, "behaviour", measure.__doc__ or "", reason, measure, dtypes))
        return measure

    return add


@case("a row in any company", "the same numbers, or rounding where torch.mean itself sums a row otherwise", BOTH)
@torch.no_grad()
def row_in_company(subject: Subject, dtype: torch.dtype) -> Measurement:
    """The same bits for a row alone, among 9 to 2,000 rows, in a prompt, in pieces of it, and decoded."""
    return worst({f"width {width}": _company(subject, width, dtype) for width in (64, 768, 1001)})


def _company(subject: Subject, width: int, dtype: torch.dtype) -> Measurement:
    norm, x = Given((36, width)).to(subject, dtype)
    whole = norm(x.clone()).clone()  # a norm may write its next output over this one

    def in_pieces(x: Tensor, size: int, dim: int = 0) -> Tensor:
        return torch.cat([norm(piece.clone()).clone() for piece in x.split(size, dim)], dim).view(36, width)

    elsewhere = {
        "alone": in_pieces(x, 1),
        "in another place": norm(x.flip(0)).flip(0),
        "among 9": in_pieces(x, 9),
        **{f"among {rows:,}": norm(x.repeat(56, 1)[-rows:])[-36:].clone() for rows in (255, 256, 2000)},
        "in a prompt": in_pieces(x.view(2, 18, width), 18, dim=1),
        "in pieces of a prompt": in_pieces(x.view(2, 18, width), 7, dim=1),
        "decoded": in_pieces(x.view(2, 18, width), 1, dim=1),
    }
    bound = norm.truth(x).bound * (0 if _sums_alike(x) else 2)
    return worst({place: worst_element(y, whole, bound) for place, y in elsewhere.items()})


def _sums_alike(x: Tensor) -> bool:
    """Return True if PyTorch's own mean of a row, on this device, has the same bits alone as among others."""
    x = x.float()
    return torch.equal(torch.cat([row.mean(-1) for row in x.split(1)]), x.mean(-1))


@case("input left as it was", EXACTLY, BOTH)
@torch.no_grad()
def input_kept(subject: Subject, dtype: torch.dtype) -> Measurement:
    """The call does not change its input."""
    found = {}
    for shape in ((12, 64), (2, 6, 64), (1, 1, 64)):
        candidate, x = Given(shape).to(subject, dtype)
        before = x.clone()
        candidate(x)
        found[f"shape {shape}"] = same_numbers(x, before)
    return worst(found)


@case("same input, same output", EXACTLY)
@torch.no_grad()
def repeated(subject: Subject, dtype: torch.dtype) -> Measurement:
    """A second call repeats the first, also after a call with other rows."""
    candidate, again = (subject.drawing_for("the same weights").candidate(768) for _ in range(2))
    x, other = (subject.rows(12, 768, dtype=dtype) for _ in range(2))
    first = candidate(x.clone()).clone()
    again(other)
    calls = {"the second call": candidate, "the call after other rows": again}
    return worst({name: same_numbers(norm(x.clone()), first) for name, norm in calls.items()})


@case("output left as it was", EXACTLY)
@torch.no_grad()
def output_kept(subject: Subject, dtype: torch.dtype) -> Measurement:
    """The next call does not change an output."""
    candidate, x = Given((12, 64)).to(subject, dtype)
    y = candidate(x)
    before = y.clone()
    candidate(subject.rows(12, 64, dtype=dtype))
    return same_numbers(y, before)


@case("weights that change", "the numbers must be those of a new norm with these weights", BOTH)
@torch.no_grad()
def weights_changed(subject: Subject, dtype: torch.dtype) -> Measurement:
    """Scale and shift change in place between two calls, as in a training step or a load."""
    candidate, x = Given((12, 64)).to(subject, dtype)
    candidate(x.clone())
    scale, shift = (parameter.copy_(1 + parameter.flip(0)) for parameter in candidate.parameters.values())
    fresh = subject.candidate(64, dtype, weights=lambda width, generator: (scale.clone(), shift.clone()))
    return same_numbers(candidate(x.clone()), fresh(x.clone()))


@case("residual added too", "the sum exactly; for its norm the bound of the rows and the dtype", tuple(DTYPES.values()))
def residual_added(subject: Subject, dtype: torch.dtype) -> Measurement:
    """add_norm(residual, delta), if it has one: the exact sum, its norm, and both inputs unchanged."""
    found = {}
    others = {dtype, torch.bfloat16} if dtype == torch.float32 else {dtype}
    for given, other, training in itertools.product(SUMS, others, (True, False)):
        candidate, x = given.to(subject, dtype)
        candidate.module.train(training)
        delta = given.of_input(subject.rows(*given.shape, dtype=other))
        residual, delta = (x, delta) if given.kind is ORDINARY else parts_of(x)
        name = f"{given.kind.name} {given.shape} with a delta in {dtype_name(delta.dtype)}" + ", training" * training
        with torch.set_grad_enabled(training):
            found |= _sum_and_norm(candidate, residual.requires_grad_(training), delta, name)
    return worst(found)


# Rows, texts, one token of several texts, one token, and a width that no block of a kernel divides
SUMS = [Given(shape) for shape in ((12, 768), (3, 4, 64), (12, 1, 64), (1, 1, 64), (5, 1001))]
SUMS += [Given((12, 64), of_input=transposed), *(Given((12, 64), kind) for kind in ROW_KINDS[1:])]


def _sum_and_norm(candidate: Candidate, residual: Tensor, delta: Tensor, given: str) -> dict[str, Measurement]:
    before, expected = (residual.clone(), delta.clone()), residual + delta
    total, y = candidate.add_norm(residual, delta)
    return {
        f"the residual after it, {given}": same_numbers(residual, before[0]),
        f"the delta after it, {given}": same_numbers(delta, before[1]),
        f"the sum of {given}": same_numbers(total, expected),
        f"the norm of {given}": against_truth(candidate, expected, y),
    }


@case("any mode", FLOAT32)
def any_mode(subject: Subject, dtype: torch.dtype) -> Measurement:
    """Training or not, with gradients, without, or for inference."""
    (candidate, x), found = Given((3, 4, 768)).to(subject, dtype), {}
    modes = {"with gradients": torch.enable_grad, "without": torch.no_grad, "for inference": torch.inference_mode}
    for training, (name, mode) in itertools.product((True, False), modes.items()):
        candidate.module.train(training)
        with mode():
            y = candidate(x.clone().requires_grad_(mode is torch.enable_grad))
        found[f"{'training' if training else 'not training'}, {name}"] = against_truth(candidate, x, y.detach())
    return worst(found)


@case("another eps", FLOAT32)
def another_eps(subject: Subject, dtype: torch.dtype) -> Measurement:
    """Built with eps=0.001. A norm that takes no eps is not judged."""
    if not subject.takes_eps:
        raise Unsupported("its eps cannot be set")
    x = subject.put(0.05 * ordinary(12, 64, subject.generator), dtype)
    return against_truth(subject.candidate(eps=OTHER_EPS), x)


@case("no bias", FLOAT32)
def no_bias(subject: Subject, dtype: torch.dtype) -> Measurement:
    """Built with bias=False. A norm that raises without a bias is not judged: every GPT-2 has one."""
    x = subject.rows(12, 64, dtype=dtype)
    try:
        return against_truth(subject.candidate(bias=False), x)
    except RAISED as error:
        raise Unsupported(f"without a bias, {described(error)}") from error


@case(
    "autocast", "the bound of the input's dtype; twice that of half precision, for rounded weights", (BOTH[0], *HALVES)
)
@torch.no_grad()
def autocast(subject: Subject, dtype: torch.dtype) -> Measurement:
    """Under autocast, float32 input stays in float32, and half activations meet float32 weights."""
    if dtype == torch.float16 and subject.device.type == "cpu":
        raise Unsupported("autocast to float16 is for GPUs")
    is_half = dtype in HALVES
    rows = ordinary(12, 768, subject.generator) if is_half else far_from_zero(12, 768, subject.generator) / 10
    candidate, x = subject.candidate(768), subject.put(rows, dtype)
    with torch.autocast(x.device.type, dtype if is_half else torch.bfloat16):
        y = candidate(x, dtypes=[torch.float32])  # as layer_norm: the input's dtype on a CPU, float32 on CUDA
    found = against_truth(candidate, x, y)
    return found._replace(bound=(1 + is_half) * found.bound)
