"""Cases of behaviour: rows stay independent, inputs stay unchanged, eps and bias hold, and add_norm adds.

The docstring of a function is what the report says that it tests.
"""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from minigpt.conformance.case import EXACTLY, Case, Compare, Compared
from minigpt.conformance.cases import FLOAT32, Given
from minigpt.conformance.rows import ORDINARY, ROW_KINDS, far_from_zero, ordinary, transposed
from minigpt.conformance.subject import OTHER_EPS, Subject, Unsupported
from minigpt.device import DTYPES, HALVES, dtype_name
from minigpt.errors import NormError
from minigpt.norms.add import parts_of

BOTH = (torch.float32, torch.bfloat16)
BEHAVIOUR_CASES: list[Case] = []


def case(name: str, reason: str, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> Callable[[Compare], Compare]:
    """Decorate a function that compares what answers this question."""

    def add(compare: Compare) -> Compare:
        BEHAVIOUR_CASES.append(Case(name, "behaviour", compare.__doc__ or "", reason, compare, dtypes))
        return compare

    return add


@case("a row in any company", "the same numbers, or rounding where torch.mean itself sums a row otherwise", BOTH)
def row_in_company(subject: Subject, dtype: torch.dtype) -> Iterator[Compared]:
    """The same bits for a row alone, among 9 to 2,000 rows, in a prompt, in pieces of it, and decoded."""
    for width in (64, 768, 1001):
        norm, x = Given((36, width)).to(subject, dtype)
        whole = norm(x.clone()).clone()  # a norm may write its next output over this one
        bound = norm.truth(x).bound * (0 if _sums_alike(x) else 2)
        rows, prompt = (36, width), (2, 18, width)
        pieces = {
            "alone": (rows, 1),
            "among 9": (rows, 9),
            "in a prompt": (prompt, 18),
            "in pieces of a prompt": (prompt, 7),
            "decoded": (prompt, 1),
        }
        for place, (shape, size) in pieces.items():
            y = torch.cat([norm(piece.clone()).clone() for piece in x.view(shape).split(size, -2)], -2)
            yield f"width {width}, {place}", y.view(rows), whole, bound
        yield f"width {width}, in another place", norm(x.flip(0)).flip(0), whole, bound
        for many in (255, 256, 2000):
            yield f"width {width}, among {many:,}", norm(x.repeat(56, 1)[-many:])[-36:], whole, bound


def _sums_alike(x: Tensor) -> bool:
    """Return True if PyTorch's own mean of a row, on this device, has the same bits alone as among others."""
    x = x.float()
    return torch.equal(torch.cat([row.mean(-1) for row in x.split(1)]), x.mean(-1))


@case("input left as it was", EXACTLY, BOTH)
def input_kept(subject: Subject, dtype: torch.dtype) -> Iterator[Compared]:
    """The call does not change its input."""
    for shape in ((12, 64), (2, 6, 64), (1, 1, 64)):
        norm, x = Given(shape).to(subject, dtype)
        before = x.clone()
        norm(x)
        yield f"shape {shape}", x, before, 0


@case("same input, same output", EXACTLY)
def repeated(subject: Subject, dtype: torch.dtype) -> Iterator[Compared]:
    """A second call repeats the first, also after a call with other rows."""
    norm, again = (subject.drawing_for("the same weights").candidate(768) for _ in range(2))
    x, other = (subject.rows(12, 768, dtype=dtype) for _ in range(2))
    first = norm(x.clone()).clone()
    yield "the second call", norm(x.clone()), first, 0
    again(other)
    yield "the call after other rows", again(x.clone()), first, 0


@case("output left as it was", EXACTLY)
def output_kept(subject: Subject, dtype: torch.dtype) -> Iterator[Compared]:
    """The next call does not change an output."""
    norm, x = Given((12, 64)).to(subject, dtype)
    y = norm(x)
    before = y.clone()
    norm(subject.rows(12, 64, dtype=dtype))
    yield "the output", y, before, 0


@case("weights that change", "the numbers must be those of a new norm with these weights", BOTH)
def weights_changed(subject: Subject, dtype: torch.dtype) -> Iterator[Compared]:
    """Scale and shift change in place between two calls, as in a training step or a load."""
    norm, x = Given((12, 64)).to(subject, dtype)
    norm(x.clone())
    scale, shift = (parameter.copy_(1 + parameter.flip(0)) for parameter in norm.parameters.values())
    fresh = subject.candidate(64, dtype, weights=lambda width, generator: (scale.clone(), shift.clone()))
    yield "the next call", norm(x.clone()), fresh(x.clone()), 0


# Rows, texts, one token of several texts, one token, and a width that no block of a kernel divides
SUMS = [Given(shape) for shape in ((12, 768), (3, 4, 64), (12, 1, 64), (1, 1, 64), (5, 1001))]
SUMS += [Given((12, 64), of_input=transposed), *(Given((12, 64), kind) for kind in ROW_KINDS[1:])]


@case("residual added too", "the sum exactly; for its norm the bound of the rows and the dtype", tuple(DTYPES.values()))
def residual_added(subject: Subject, dtype: torch.dtype) -> Iterator[Compared]:
    """add_norm(residual, delta), if it has one: the exact sum, its norm, and both inputs unchanged."""
    others = {dtype, torch.bfloat16} if dtype == torch.float32 else {dtype}
    for given, other, training in itertools.product(SUMS, others, (True, False)):
        norm, x = given.to(subject, dtype)
        norm.module.train(training)
        delta = given.of_input(subject.rows(*given.shape, dtype=other))
        residual, delta = (x, delta) if given.kind is ORDINARY else parts_of(x)
        before, expected = (residual.clone(), delta.clone()), residual + delta
        with torch.set_grad_enabled(training):
            total, y = norm.add_norm(residual.requires_grad_(training), delta)
        name = f"{given.kind.name} {given.shape} with a delta in {dtype_name(delta.dtype)}" + ", training" * training
        yield f"the residual after it, {name}", residual, before[0], 0
        yield f"the delta after it, {name}", delta, before[1], 0
        yield f"the sum of {name}", total, expected, 0
        values, bound = norm.truth(expected)
        yield f"the norm of {name}", y, values, bound


@case("any mode", FLOAT32)
def any_mode(subject: Subject, dtype: torch.dtype) -> Iterator[Compared]:
    """Training or not, with gradients, without, or for inference."""
    norm, x = Given((3, 4, 768)).to(subject, dtype)
    values, bound = norm.truth(x)
    modes = {"with gradients": torch.enable_grad, "without": torch.no_grad, "for inference": torch.inference_mode}
    for training, (name, mode) in itertools.product((True, False), modes.items()):
        norm.module.train(training)
        with mode():
            y = norm(x.clone().requires_grad_(mode is torch.enable_grad))
        yield f"{'training' if training else 'not training'}, {name}", y, values, bound


@case("another eps", FLOAT32)
def another_eps(subject: Subject, dtype: torch.dtype) -> Iterator[Compared]:
    """Built with eps=0.001. A norm that takes no eps is not judged."""
    if not subject.takes_eps:
        raise Unsupported("its eps cannot be set")
    x = subject.put(0.05 * ordinary(12, 64, subject.generator), dtype)
    yield subject.candidate(eps=OTHER_EPS).compared(x)


@case("no bias", FLOAT32)
def no_bias(subject: Subject, dtype: torch.dtype) -> Iterator[Compared]:
    """Built with bias=False. A norm that raises without a bias is not judged: every GPT-2 has one."""
    x = subject.rows(12, 64, dtype=dtype)
    try:
        yield subject.candidate(bias=False).compared(x)
    except NormError as error:
        raise Unsupported(f"without a bias, {error}") from error


@case(
    "autocast", "the bound of the input's dtype; twice that of half precision, for rounded weights", (BOTH[0], *HALVES)
)
def autocast(subject: Subject, dtype: torch.dtype) -> Iterator[Compared]:
    """Under autocast, float32 input stays in float32, and half activations meet float32 weights."""
    if dtype == torch.float16 and subject.device.type == "cpu":
        raise Unsupported("autocast to float16 is for GPUs")
    is_half = dtype in HALVES
    rows = ordinary(12, 768, subject.generator) if is_half else far_from_zero(12, 768, subject.generator) / 10
    norm, x = subject.candidate(768), subject.put(rows, dtype)
    values, bound = norm.truth(x)
    with torch.autocast(x.device.type, dtype if is_half else torch.bfloat16):
        y = norm(x, dtypes=[torch.float32])  # as layer_norm: the input's dtype on a CPU, float32 on CUDA
    yield "", y, values, (1 + is_half) * bound
