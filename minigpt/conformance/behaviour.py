"""Cases of behaviour: rows stay independent, inputs stay unchanged, eps and bias hold.

The docstring of a function is what the report says that it tests.
"""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from minigpt.conformance.case import EXACTLY, OTHER_EPS, Case, Compare, Compared, Subject, Unsupported
from minigpt.conformance.cases import FLOAT32, TWO, Given, against_truth, gradients
from minigpt.conformance.truth import far_from_zero, ordinary
from minigpt.device import HALVES
from minigpt.errors import NormError

BEHAVIOUR_CASES: list[Case] = []


def case(name: str, reason: str, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> Callable[[Compare], Compare]:
    """Decorate a function that compares what answers this question."""

    def add(compare: Compare) -> Compare:
        BEHAVIOUR_CASES.append(Case(name, "behaviour", compare.__doc__ or "", reason, compare, dtypes))
        return compare

    return add


@case("a row in any company", "the same numbers, or rounding where torch.mean itself sums a row otherwise", TWO)
def row_in_company(subject: Subject, dtype: torch.dtype) -> Iterator[Compared]:
    """The same bits for a row alone, among 9 to 2,000 rows, in a prompt, in pieces of it, and decoded."""
    for width in (64, 768, 1001):
        norm, x = Given((36, width)).to(subject, dtype)
        bound = norm.truth(x).bound * (0 if _sums_alike(x) else 2)
        rows, prompt = (36, width), (2, 18, width)
        pieces = {
            "alone": (rows, 1),
            "among 9": (rows, 9),
            "in a prompt": (prompt, 18),
            "in pieces of a prompt": (prompt, 7),
            "decoded": (prompt, 1),
        }
        whole = norm(x.clone()).clone()  # a norm may write its next output over this one
        for place, (shape, size) in pieces.items():
            y = torch.cat([norm(piece.clone()).clone() for piece in x.view(shape).split(size, -2)], -2)
            yield Compared(f"width {width}, {place}", y.view(rows), whole, bound)
        yield Compared(f"width {width}, in another place", norm(x.flip(0)).flip(0), whole, bound)
        for many in (255, 256, 2000):
            last = norm(x.repeat(56, 1)[-many:])[-36:]
            yield Compared(f"width {width}, among {many:,}", last, whole, bound)


def _sums_alike(x: Tensor) -> bool:
    """Return True if PyTorch's own mean of a row, on this device, has the same bits alone as among others."""
    x = x.float()
    return torch.equal(torch.cat([row.mean(-1) for row in x.split(1)]), x.mean(-1))


@case("input left as it was", EXACTLY, TWO)
def input_kept(subject: Subject, dtype: torch.dtype) -> Iterator[Compared]:
    """The call does not change its input."""
    for shape in ((12, 64), (2, 6, 64), (1, 1, 64)):
        norm, x = Given(shape).to(subject, dtype)
        before = x.clone()
        norm(x)
        yield Compared(f"shape {shape}", x, before, 0)


@case("same input, same output", EXACTLY)
def repeated(subject: Subject, dtype: torch.dtype) -> Iterator[Compared]:
    """A second call repeats the first, also after a call with other rows."""
    norm, again = (subject.drawing_for("the same weights").candidate(768) for _ in range(2))
    x, other = (subject.rows(12, 768, dtype=dtype) for _ in range(2))
    first = norm(x.clone()).clone()
    yield Compared("the second call", norm(x.clone()), first, 0)
    again(other)
    yield Compared("the call after other rows", again(x.clone()), first, 0)
    yield Compared("the call after its input was overwritten", again(other.copy_(x)), first, 0)


@case("many calls", EXACTLY)
def many_calls(subject: Subject, dtype: torch.dtype) -> Iterator[Compared]:
    """300 calls of one norm repeat the first, and so do 40 backward passes."""
    norm, x = Given((2, 3, 64)).to(subject, dtype)
    dy, first = subject.rows(2, 3, 64), norm(x.clone()).clone()
    for call in range(300):
        yield Compared(f"call {call + 2}", norm(x.clone()), first, 0)
    norm.module.train()
    before, true = gradients(norm, norm, x, dy), norm.gradient_truth(x, dy)
    for step in range(40):
        for name, gradient in gradients(norm, norm, x, dy).items():
            yield Compared(f"{name} in backward pass {step + 2}", gradient, before[name], 2 * true[name].bound)


@case("overlapping calls", FLOAT32)
def overlapping(subject: Subject, dtype: torch.dtype) -> Iterator[Compared]:
    """A backward pass after another forward pass, then once more, with the incoming gradient unchanged."""
    norm, x = Given((12, 64)).to(subject, dtype)
    norm.module.train()
    dy, leaf = subject.rows(12, 64), x.clone().requires_grad_()
    before, true = dy.clone(), norm.gradient_truth(x, dy)["input"]
    with torch.enable_grad():
        y = norm(leaf)
        norm(subject.rows(12, 64).requires_grad_())
        for place in ("after another call", "once more"):
            (gradient,) = torch.autograd.grad(y, leaf, dy, retain_graph=True)
            yield Compared(f"the gradient of the input, {place}", gradient, *true[:2], part="input")
    yield Compared("the incoming gradient", dy, before, 0, "input")


@case("output left as it was", EXACTLY)
def output_kept(subject: Subject, dtype: torch.dtype) -> Iterator[Compared]:
    """The next call does not change an output."""
    norm, x = Given((12, 64)).to(subject, dtype)
    y = norm(x)
    before = y.clone()
    norm(subject.rows(12, 64, dtype=dtype))
    yield Compared("the output", y, before, 0)


@case("weights that change", "the numbers must be those of a new norm with these weights", TWO)
def weights_changed(subject: Subject, dtype: torch.dtype) -> Iterator[Compared]:
    """Scale and shift change in place between two calls, as in a training step or a load."""
    norm, x = Given((12, 64)).to(subject, dtype)
    norm(x.clone())
    scale, shift = (parameter.copy_(1 + parameter.flip(0)) for parameter in norm.parameters.values())
    fresh = subject.candidate(64, dtype, weights=lambda width, generator: (scale.clone(), shift.clone()))
    yield Compared("the next call", norm(x.clone()), fresh(x.clone()), 0)


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
        yield Compared(f"{'training' if training else 'not training'}, {name}", y, values, bound)


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


@case("half rows, float32 scale", "the bound of the input's dtype", HALVES)
def float32_scale(subject: Subject, dtype: torch.dtype) -> Iterator[Compared]:
    """Half precision rows and float32 weights without autocast. A norm that raises is not judged."""
    norm, x = subject.candidate(768), subject.rows(24, 768, dtype=dtype)
    try:
        y = norm(x, dtypes=[torch.float32])
    except NormError as error:
        raise Unsupported(f"with a float32 scale, {error}") from error
    yield Compared("values", y, *norm.truth(x))
    dy = subject.rows(24, 768, dtype=dtype)
    found = gradients(norm, lambda rows: norm(rows, dtypes=[torch.float32]), x, dy)
    yield from against_truth(norm, found, x, dy)


@case(
    "autocast", "the bound of the input's dtype; twice that of half precision, for rounded weights",
    (torch.float32, *HALVES),
)  # fmt: skip
def autocast(subject: Subject, dtype: torch.dtype) -> Iterator[Compared]:
    """Under autocast, float32 input stays in float32, and half activations meet float32 weights."""
    if dtype == torch.float16 and subject.device.type == "cpu":
        raise Unsupported("autocast to float16 is for GPUs")
    is_half = dtype in HALVES
    rows = ordinary(12, 768, subject.generator) if is_half else far_from_zero(12, 768, subject.generator) / 10
    norm, x = subject.candidate(768), subject.put(rows, dtype)
    values, bound = norm.truth(x, roundings=3)
    with torch.autocast(x.device.type, dtype if is_half else torch.bfloat16):
        y = norm(x, dtypes=[torch.float32])  # as layer_norm: the input's dtype on a CPU, float32 on CUDA
    yield Compared("", y, values, (1 + is_half) * bound)
