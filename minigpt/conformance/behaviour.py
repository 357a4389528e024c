"""Cases of behaviour: rows are independent, calls are independent, and eps, bias and modes hold.

The docstring of a function is what the report says that it tests.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from minigpt.conformance.case import Axis, Case, Compare, Outcomes
from minigpt.conformance.cases import BOUND, Incoming, Input, gradients
from minigpt.conformance.compare import Kind, Outcome, compare
from minigpt.conformance.subject import OTHER_EPS, Built, Subject, Unsupported
from minigpt.conformance.truth import far_from_zero, ordinary
from minigpt.errors import NormError
from minigpt.precision import HALVES, dtype_name

BEHAVIOUR_CASES: list[Case] = []
EXACTLY = "the numbers must be the same: nothing is rounded"
REPEATED_CALLS = 20  # more than a small cache is long
MIXED_PRECISION = "mixed precision"
BY_ORDER = "that of the same gradient by itself, since rounding may differ from call to call"


def case(name: str, reason: str, *, is_threaded: bool = False) -> Callable[[Compare], Compare]:
    """Decorate a function that compares what answers this question."""

    def add(ask: Compare) -> Compare:
        about = ask.__doc__ or ""
        BEHAVIOUR_CASES.append(Case(name, "behaviour", about, reason, ask, Axis.BEHAVIOUR, name, is_threaded))
        return ask

    return add


@case(
    "rows are independent of the batch",
    "the same bits, or rounding where torch.mean itself sums a row otherwise",
    is_threaded=True,
)
def rows_independent(subject: Subject, dtype: torch.dtype) -> Outcomes:
    """The same bits for a row alone, among 9 to 2,000 rows, in a prompt, in pieces of it, and decoded."""
    widths = (64, 768, 1600)
    if subject.has_few_shapes:
        widths = (768,)
    for width in widths:
        norm, x = Input((36, width)).to(subject, dtype)
        whole = norm(x.clone()).clone()  # a norm may write its next output over this one
        outputs = in_other_batches(norm, x, subject.has_few_shapes)
        bound = 2 * norm.truth(x).bound
        if subject.repeats_bits and _sums_repeat(x):
            bound = torch.zeros_like(bound)
        for place, y in outputs.items():
            yield compare(f"width {width}, {place}", y, whole, bound)


def in_other_batches(norm: Built, x: Tensor, has_few_shapes: bool) -> dict[str, Tensor]:
    """Return the norm of the same 36 rows (36, width) from calls with fewer, more and other rows."""
    rows, prompt = x.shape, (2, 18, x.shape[-1])
    places = [("alone", rows, 1), ("among 9", rows, 9), ("decoded", prompt, 1)]
    sizes: tuple[int, ...] = ()
    if not has_few_shapes:
        places += [("in a prompt", prompt, 18), ("in pieces of a prompt", prompt, 7)]
        sizes = (255, 256, 2000)
    outputs: dict[str, Tensor] = {}
    for place, shape, size in places:
        pieces = x.view(shape).split(size, -2)
        whole = torch.cat([norm(piece.clone()).clone() for piece in pieces], -2)
        outputs[place] = whole.view(rows)
    outputs["in another place"] = norm(x.flip(0)).flip(0)
    repeated = x.repeat(56, 1)
    for many in sizes:
        y = norm(repeated[-many:])
        outputs[f"among {many:,}"] = y[-36:].clone()
    return outputs


def _sums_repeat(x: Tensor) -> bool:
    """Return True if a row's means and variance by PyTorch have the same bits alone as among other rows."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    alone = [_statistics(row) for row in wide.split(1)]
    return torch.equal(torch.cat(alone, 1), _statistics(wide))


def _statistics(x: Tensor) -> Tensor:
    variance, mean_square = x.var(-1, correction=0), x.square().mean(-1)
    return torch.stack([x.mean(-1), variance, mean_square])


def others(subject: Subject, x: Tensor) -> list[Tensor]:
    """Return other inputs in the shape of ``x``, each at an address of its own."""
    return [subject.rows(*x.shape, dtype=x.dtype) for _ in range(REPEATED_CALLS)]


@case("input left as it was", EXACTLY)
def input_kept(subject: Subject, dtype: torch.dtype) -> Outcomes:
    """The call does not change its input."""
    for shape in ((12, 64), (2, 6, 64), (1, 1, 64)):
        norm, x = Input(shape).to(subject, dtype)
        before = x.clone()
        norm(x)
        yield compare(f"shape {shape}", x, before)


@case("output left as it was", EXACTLY)
def output_kept(subject: Subject, dtype: torch.dtype) -> Outcomes:
    """The next calls do not change an output."""
    for shape in ((12, 64), (2, 6, 64)):
        norm, x = Input(shape).to(subject, dtype)
        outputs = []
        for rows in (x, *others(subject, x)):
            y = norm(rows)
            outputs.append((y, y.clone()))
        for call, (y, before) in enumerate(outputs, start=1):
            yield compare(f"the output of call {call}", y, before)


@case("same input, same output", EXACTLY, is_threaded=True)
def repeated(subject: Subject, dtype: torch.dtype) -> Outcomes:
    """A second call repeats the first, also after a call with other rows."""
    norm, x = Input((12, 768)).to(subject, dtype)
    first = norm(x.clone()).clone()
    yield compare("the second call", norm(x.clone()), first)
    norm(subject.rows(12, 768, dtype=dtype))
    yield compare("the call after other rows", norm(x.clone()), first)


@case("same input, same output, in training", EXACTLY, is_threaded=True)
def repeated_in_training(subject: Subject, dtype: torch.dtype) -> Outcomes:
    """A second call in training repeats the first."""
    norm, x = Input((12, 768)).in_training(subject, dtype)
    first = norm(x.clone()).clone()
    yield compare("the second call", norm(x.clone()), first)


@case("calls are independent", BOUND, is_threaded=True)
def calls_independent(subject: Subject, dtype: torch.dtype) -> Outcomes:
    """Other rows of a shape that was just met, also at its address: nothing is kept from call to call."""
    rows = int(torch.randint(3, 40, (), generator=subject.generator))
    width = int(torch.randint(3, 14, (), generator=subject.generator))
    shape = (rows, 2, 64 * width)
    if subject.has_few_shapes:
        shape = (3, 4, 768)
    norm, x = Input(shape).to(subject, dtype)
    new = others(subject, x)

    def inputs() -> Iterator[tuple[str, Tensor]]:
        yield "the first rows", x
        yield from (("other rows", one) for one in new)
        yield "the same numbers in another order", x.flip(-1)
        yield "other rows at the address of earlier ones", x.copy_(new[0])
        x[-1, -1, width:] = new[1][-1, -1, width:]
        yield "a few other numbers at the address of earlier ones", x

    scale, shift = (parameter.clone() for parameter in norm.parameters.values())
    calls = []
    for what, one in inputs():
        calls.append((what, one.clone(), norm(one).clone()))
    for number, (what, one, y) in enumerate(calls, start=1):
        truth = norm.truth(one)
        outcome = compare(what, y, *truth)
        if outcome.kind is Kind.RIGHT:
            yield outcome
            continue
        # if a new norm is also wrong, in a shape of no earlier call, it remembers nothing
        fresh = subject.candidate(one.shape[-1], dtype, weights=lambda width, generator: (scale, shift))
        more = one.new_zeros(number, *one.shape[1:])
        longer = fresh(torch.cat([one, more]))
        is_remembered = compare(what, longer[: len(one)], *truth).kind is Kind.RIGHT
        yield outcome if is_remembered else compare(what, one, one)
        if number == 1 and not is_remembered:  # its formula is wrong: no other call tells more
            return


@case("many calls", EXACTLY)
def many_calls(subject: Subject, dtype: torch.dtype) -> Outcomes:
    """300 calls of one norm repeat the first, and so do 40 backward passes."""
    norm, x = Input((2, 3, 64)).to(subject, dtype)
    dy = subject.rows(2, 3, 64, dtype=dtype)
    first = norm(x.clone()).clone()
    for call in range(2, 302):
        yield compare(f"call {call}", norm(x.clone()), first)
    norm.module.train()
    before, *later = (gradients(norm, norm, x, dy.clone()) for _ in range(41))
    true = norm.gradient_truth(x, dy)
    for step, again in enumerate(later, start=2):
        for name, gradient in again.items():
            yield compare(f"{name} in backward pass {step}", gradient, before[name], 2 * true[name].bound)


@case("incoming gradient left as it was", EXACTLY)
def incoming_kept(subject: Subject, dtype: torch.dtype) -> Outcomes:
    """The backward pass does not change the gradient that it gets."""
    shapes = [(12, 64), (2, 6, 64), (1, 1, 64), (2, 3, 2, 64)]
    if subject.has_few_shapes:
        shapes = shapes[:1]
    for shape in shapes:
        norm, x = Input(shape).in_training(subject, dtype)
        dy = subject.rows(*shape, dtype=dtype)
        before = dy.clone()
        gradients(norm, norm, x, dy)
        yield compare(f"shape {shape}", dy, before)


@case("backward after another call", BY_ORDER)
def overlapping(subject: Subject, dtype: torch.dtype) -> Outcomes:
    """A backward pass after another forward pass has the gradients of its own call."""
    other = subject.rows(12, 64, dtype=dtype).requires_grad_()
    yield _second_pass(subject, dtype, lambda norm, y, leaf, dy: norm(other))


@case("backward twice", BY_ORDER)
def backward_twice(subject: Subject, dtype: torch.dtype) -> Outcomes:
    """A backward pass that is repeated has the same gradients again."""
    again = lambda norm, y, leaf, dy: torch.autograd.grad(Incoming.apply(y, dy.clone()), leaf, retain_graph=True)  # noqa: E731
    yield _second_pass(subject, dtype, again)


@torch.enable_grad()
def _second_pass(
    subject: Subject, dtype: torch.dtype, first: Callable[[Built, Tensor, Tensor, Tensor], object]
) -> Outcome:
    norm, x = Input((12, 64)).in_training(subject, dtype)
    dy = subject.rows(12, 64, dtype=dtype)
    leaf = x.clone().requires_grad_()
    alone = gradients(norm, norm, x, dy.clone())["input"]
    y = norm(leaf)
    first(norm, y, leaf, dy)
    (gradient,) = torch.autograd.grad(Incoming.apply(y, dy.clone()), leaf)
    true = norm.gradient_truth(x, dy)["input"]
    return compare("the gradient of the input", gradient, alone, 2 * true.bound)


@case("weights that change", "the numbers must be the same as a new norm's with these weights")
def weights_changed(subject: Subject, dtype: torch.dtype) -> Outcomes:
    """Scale and shift change in place between two calls, as in a training step or a load."""
    norm, x = Input((12, 64)).to(subject, dtype)
    norm(x.clone())
    scale, shift = (parameter.copy_(1 + parameter.flip(0)) for parameter in norm.parameters.values())
    fresh = subject.candidate(64, dtype, weights=lambda width, generator: (scale.clone(), shift.clone()))
    yield compare("the next call", norm(x.clone()), fresh(x.clone()))


@case("any mode", BOUND)
def any_mode(subject: Subject, dtype: torch.dtype) -> Outcomes:
    """Training or not, with gradients, without, for inference, or where no tensor wants a gradient."""
    norm, x = Input((3, 4, 768)).to(subject, dtype)
    modes = {
        "with gradients": torch.enable_grad,
        "without": torch.no_grad,
        "for inference": torch.inference_mode,
        "none wanted": torch.enable_grad,
    }
    outputs = {}
    for training in (True, False):
        for name, mode in modes.items():
            norm.module.train(training).requires_grad_(name != "none wanted")
            with mode():
                y = norm(x.clone().requires_grad_(name == "with gradients"))
            state = "training" if training else "not training"
            outputs[f"{state}, {name}"] = y
    values, bound = norm.truth(x)
    for name, y in outputs.items():
        yield compare(name, y, values, bound)


@case("another eps", BOUND)
def another_eps(subject: Subject, dtype: torch.dtype) -> Outcomes:
    """Built with eps=0.001. A norm that takes no eps is not judged."""
    if not subject.takes_eps:
        raise Unsupported("its eps cannot be set")
    x = subject.put(0.05 * ordinary(12, 64, subject.generator), dtype)
    yield from subject.candidate(64, dtype, eps=OTHER_EPS).compared([("", x)])


@case("no bias", BOUND)
def no_bias(subject: Subject, dtype: torch.dtype) -> Outcomes:
    """Built with bias=False. A norm that raises without a bias is not judged: every GPT-2 has one."""
    x = subject.rows(12, 64, dtype=dtype)
    try:
        yield from subject.candidate(64, dtype, bias=False).compared([("", x)])
    except NormError as error:
        raise Unsupported(f"without a bias, {error}") from error


@case("autocast", "the bound of the input's dtype; twice that of half precision, for rounded weights")
def autocast(subject: Subject, dtype: torch.dtype) -> Outcomes:
    """Under autocast, float32 input stays in float32, and half activations meet float32 weights."""
    is_float16_on_cpu = dtype == torch.float16 and subject.device.type == "cpu"
    if dtype == torch.float64 or is_float16_on_cpu:
        raise Unsupported("autocast has no float64, and float16 on GPUs alone")
    if dtype in HALVES:
        cast, times = dtype, 2
        rows = ordinary(12, 768, subject.generator)
    else:
        cast, times = torch.bfloat16, 1
        rows = far_from_zero(12, 768, subject.generator) / 10
    norm, x = subject.candidate(768), subject.put(rows, dtype)
    with torch.autocast(x.device.type, cast):
        y = norm(x.clone(), dtypes=[torch.float32])  # as layer_norm: the input's dtype on a CPU, float32 on CUDA
    values, bound = norm.truth(x, roundings=3)
    yield compare("", y, values, times * bound)


@case(
    MIXED_PRECISION, "the bound of the input's dtype; a LayerNorm's result has this dtype, as torch.nn.LayerNorm's has"
)
def mixed_precision(subject: Subject, dtype: torch.dtype) -> Outcomes:
    """Rows of 16 bits meet a scale and a shift in float32, as in a model under mixed precision."""
    if dtype not in HALVES:
        raise Unsupported("the case is about rows of 16 bits")
    norm, x = subject.candidate(768), subject.rows(12, 768, dtype=dtype)
    try:
        norm.call(x.clone())
    except NormError as error:  # torch.nn.LayerNorm takes them on a CPU, and raises on CUDA
        raise Unsupported(f"it refuses a float32 scale and shift: {error}") from error
    y = norm(x.clone(), dtypes=[torch.float32])
    came_out, rows = dtype_name(y.dtype), dtype_name(dtype)
    if subject.centers and y.dtype != dtype:
        raise NormError(
            f"{subject.name} changes the dtype: {rows} rows with a float32 scale and shift come out in {came_out}, "
            f"which a layer of {rows} weights refuses; torch.nn.LayerNorm's come out in {rows}"
        )
    yield compare(f"comes out in {came_out}", y, *norm.truth(x))
