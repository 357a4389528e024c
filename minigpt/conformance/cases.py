"""Cases as tables of inputs: values, gradients and torch.compile, each against float64."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minigpt.conformance.case import Axis, Case, Outcomes
from minigpt.conformance.compare import Kind, compare, distance
from minigpt.conformance.subject import Built, Subject, first_rows, repeat_rows
from minigpt.conformance.truth import (
    CONSTANT,
    MASSIVE,
    OFF_ZERO,
    ORDINARY,
    PERIOD,
    PRECISIONS,
    ROW_KINDS,
    RowKind,
    by_columns,
)
from minigpt.errors import NormError
from minigpt.garbage import age, uncollected
from minigpt.machine import on_threads
from minigpt.norms.foreign.construct import naming
from minigpt.norms.foreign.packages import NotSupported
from minigpt.norms.formulas import ways_of_rounding
from minigpt.precision import HALVES

# Those around the powers of two that kernels are written for, GPT-2's, and one that no block of a kernel divides
POWERS = [power + side for power in (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192) for side in (-1, 0, 1)]
CASE_WIDTHS = sorted({2, 3, 34, 36, 40, 48, 96, 192, 768, 1001, 1280, 1600, 16_384, *POWERS})
# A block of threads has 64, 256 or 1,024, and CUDA's grid ends at 65,535 in two of its three dimensions
SIZES = (1, 2, 64, 65, 256, 257, 1024, 1025, 65_536, 65_537)
RANKS = ("2-D", "3-D", "4-D")
SHAPES = {
    "2-D": (12, 64),
    "3-D": (3, 4, 64),
    "4-D": (2, 3, 2, 64),
    "no token": (2, 0, 64),
    "one token": (1, 1, 64),
    "decoding": (12, 1, 64),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {  # of 12 rows in memory: (12, 64) -> (..., 64)
    "transposed": by_columns,
    "every second column": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "not aligned": lambda x: torch.cat([x[:, :1], x], dim=1)[:, 1:],
    "one row expanded": lambda x: x[:1].expand(12, 64),
    "sequence before batch": lambda x: x.view(4, 3, 64).transpose(0, 1),
    "beside NaN": lambda x: F.pad(x, (64, 64), value=torch.nan)[:, 64:-64],
}


def among_nan(x: Tensor) -> Tensor:
    """Return the same rows, contiguous in memory that is NaN before and behind them."""
    width = x.shape[-1]
    padded = F.pad(x.flatten(), (width, width), value=torch.nan)
    return padded[width:-width].view_as(x)


class Input(NamedTuple):
    """The input of a case.

    Attributes:
        shape: of the rows, (..., width).
        kind: of the rows.
        lay_input, lay_gradient: lay out the input, and the incoming gradient, in memory.
        frozen: the name of the tensor that takes no gradient: "input", "weight" or "bias".
    """

    shape: tuple[int, ...]
    kind: RowKind = ORDINARY
    lay_input: Callable[[Tensor], Tensor] = lambda x: x
    lay_gradient: Callable[[Tensor], Tensor] = lambda dy: dy
    frozen: str = ""

    def to(self, subject: Subject, dtype: torch.dtype) -> tuple[Built, Tensor]:
        """Return the norm and its input."""
        x = subject.rows(*self.shape, dtype=dtype, kind=self.kind)
        return subject.candidate(self.shape[-1], dtype, weights=self.kind.weights), self.lay_input(x)

    def in_training(self, subject: Subject, dtype: torch.dtype) -> tuple[Built, Tensor]:
        """Return the norm in training mode and its input."""
        norm, x = self.to(subject, dtype)
        norm.module.train()
        return norm, x


def values(inputs: list[Input], subject: Subject, dtype: torch.dtype) -> Outcomes:
    """Compare the norm of each input with float64."""
    for one in inputs:
        norm, x = one.to(subject, dtype)
        rows = first_rows(x).clone()  # the norm may write into its input
        yield compare(f"shape {one.shape}", norm(x), *norm.truth(rows))


def not_finite(subject: Subject, dtype: torch.dtype) -> Outcomes:
    """Put a NaN into row 1, an infinity into row 3 and two into row 4."""
    norm, x = Input((6, 64)).to(subject, dtype)
    spoilt = x.clone()
    spoilt[1, 7] = torch.nan
    spoilt[3, 0] = torch.inf
    spoilt[4, 5], spoilt[4, 63] = -torch.inf, torch.inf
    y = norm(spoilt)
    if y[[1, 3, 4]].isfinite().all(-1).any():
        raise NormError("it returns finite numbers where torch's layer_norm returns NaN, so it hides a NaN")
    yield compare("the other rows", y[[0, 2, 5]], norm(x)[[0, 2, 5]])


def bias_and_slope(subject: Subject, dtype: torch.dtype) -> Outcomes:
    """Measure what no single number shows: errors to one side, and rows that are too long or too short.

    The mean error towards 0 is in units of u: truncation has 1/2 or more, rounding less than 1/50 in 1,021 rows. The
    slope of a row over the true one is 1 up to the rounding of its deviation, and of n results in half precision.
    """
    norm, x = Input((PERIOD, 64)).to(subject, dtype)
    precision = PRECISIONS[dtype]
    y, true = norm(x.clone()).cpu().double(), norm.truth(x).values
    error = y - true
    to_zero = (error * true.sign()).sum() / true.abs().sum()
    yield compare("mean error towards 0, in roundings", to_zero / precision.result, torch.zeros(()), 0.25)
    centred = true - true.mean(-1, keepdim=True)
    slope = (error * centred).sum(-1) / centred.square().sum(-1)
    allowed = 16 * precision.statistics
    if precision.is_half:
        allowed += 0.6 * (1 + norm.rounds_row) * precision.result
    yield compare("slope of a row", slope, torch.zeros(len(x)), allowed)


def roundings(subject: Subject, dtype: torch.dtype) -> Outcomes:
    """Count the values whose bits no right way of rounding gives, without a shift.

    A result is rounded once. A norm of another class that lacks a scale rounds its row as well; an RMSNorm may, as
    Llama's do. Two ways differ in a quarter of the values. Arithmetic in float32 moves fewer than one of 50 to
    other bits.
    """
    norm, x = Input((PERIOD, 64)).to(subject, dtype)
    if norm.module.bias is not None:
        norm.module.bias.zero_()
    y, other = norm(x.clone()).cpu(), torch.zeros(())
    if PRECISIONS[dtype].is_half:
        weight = norm.module.weight.cpu().double()
        ways = ways_of_rounding(norm.truth(x).values / weight, weight, dtype)
        other = (y != ways["once"]).double().mean()
        if not subject.centers or (norm.adapted and norm.adapted.multiplies):
            other = min(other, (y != ways["row"]).double().mean())
    yield compare("share of values", other, torch.zeros(()), 0.02)


BOUND = "4 + 2 sqrt(n) roundings times largest value / deviation, in float32 for half precision, and one of the result"
OF_NAN = "a row that holds one is not finite, as with layer_norm"
SAME_BITS = "the other rows must have the same bits as without it"
OF_SIZES = "many rows, texts or tokens"
OF_SHAPES = "the shape and the strides of the input"

Table = dict[str, Input]  # the input of a case, by the value on its axis


def rows_of_width() -> Table:
    """Return inputs of each width of ``CASE_WIDTHS``."""
    return {str(width): Input((33 if width < 1100 else 7, width)) for width in CASE_WIDTHS}


def sizes() -> dict[Axis, Table]:
    """Return inputs with each size of ``SIZES`` as the number of rows, of texts and of tokens."""
    rows, texts, tokens = Table(), Table(), Table()
    for size in SIZES:
        other = 2 if size < 2000 else 1
        rows[f"{size:,}"] = Input((size, 64))
        texts[f"{size:,}"] = Input((size, other, 64))
        tokens[f"{size:,}"] = Input((other, size, 64))
    return {Axis.ROWS: rows, Axis.BATCH: texts, Axis.SEQUENCE: tokens}


def value_case(axis: Axis, value: str, group: str, tests: str, inputs: list[Input]) -> Case:
    """Return the case that compares the norm of each of ``inputs`` with float64."""
    return Case(axis.named(value), group, tests, BOUND, partial(values, inputs), axis, value)


def value_cases() -> list[Case]:
    """Return the cases that compare outputs with float64, in the order in which they run."""
    cases = []
    for kind in ROW_KINDS:
        inputs = [Input((24, width), kind) for width in (64, 768)]
        cases.append(value_case(Axis.KIND, kind.name, "values", kind.tests, inputs))
    of_values = {
        "bias and slope": (
            "the mean of many errors, and the length of a row",
            "a quarter of a rounding; 16 of the statistics",
            bias_and_slope,
        ),
        "roundings": ("where a norm rounds in half precision", "one value of 50", roundings),
        "infinity and NaN": (OF_NAN, SAME_BITS, not_finite),
    }
    for name, (tests, reason, ask) in of_values.items():
        cases.append(Case(name, "values", tests, reason, ask, Axis.BEHAVIOUR, name))
    for width, one in rows_of_width().items():
        cases.append(value_case(Axis.WIDTH, width, "widths", "rows of this width", [one]))
    by_axis = sizes()
    for size in by_axis[Axis.ROWS]:
        for axis, table in by_axis.items():
            cases.append(value_case(axis, size, "sizes", OF_SIZES, [table[size]]))
    for name, shape in SHAPES.items():
        cases.append(value_case(Axis.SHAPE, name, "layouts", OF_SHAPES, [Input(shape)]))
    surrounded = [Input((5, width), lay_input=among_nan) for width in (64, 1600)]
    cases.append(value_case(Axis.SHAPE, "NaN-surrounded", "layouts", OF_SHAPES, surrounded))
    for name, lay in LAYOUTS.items():
        cases.append(value_case(Axis.STRIDES, name, "layouts", OF_SHAPES, [Input((12, 64), lay_input=lay)]))
    return cases


VALUE_CASES = value_cases()


def of_gradients(one: Input, subject: Subject, dtype: torch.dtype) -> Outcomes:
    """Compare the norm's gradients with float64.

    In half precision PyTorch's own backward pass loses digits. A norm that calls it is judged with it in float32.
    """
    norm, x = one.in_training(subject, dtype)
    dy = one.lay_gradient(subject.rows(*one.shape, dtype=dtype))
    shape, count = x.shape, x[..., 0].numel()
    rows, incoming = first_rows(x).clone(), first_rows(dy).clone()  # the norm may write into its input, and into dy
    measured = backward(norm, norm, x, dy, one.frozen).gradients
    truth = norm.gradient_truth(rows, incoming, count)
    outcomes = {name: compare(name, gradient, *truth[name], name) for name, gradient in measured.items()}
    if dtype in HALVES and not all(outcome.kind is Kind.RIGHT for outcome in outcomes.values()):

        def again(norm: Built) -> dict[str, Tensor]:
            x, dy = (repeat_rows(tensor, count).view(shape) for tensor in (rows, incoming))
            return backward(norm, norm, one.lay_input(x), one.lay_gradient(dy), one.frozen).gradients

        with PyTorchInFloat32() as calls:
            exact = again(norm)
            if calls.backward > 1:  # of pieces of the rows; autograd adds their gradients in the dtype of the weights
                exact = again(norm.in_float32())
        if calls.backward:
            for name, gradient in measured.items():
                true, bound = truth[name]
                first = gradient.flatten()[: true.numel()].view_as(true).cpu().double()
                outcome = compare(name, exact[name], true, bound, name)
                outcomes[name] = dataclasses.replace(outcome, lost=distance(first, true))
    yield from outcomes.values()


aten = torch.ops.aten
PYTORCH_BACKWARD = {aten.native_layer_norm_backward.default, aten.native_group_norm_backward.default}
PYTORCH_NORMS = PYTORCH_BACKWARD | {aten.native_layer_norm.default, aten.native_group_norm.default}


class PyTorchInFloat32(TorchDispatchMode):
    """Computes PyTorch's own norms of half precision in float32 in the block, forward and backward.

    On the CPU they keep mean and deviation for the backward pass in half precision, and add the gradients of scale and
    shift in it.

    Attributes:
        backward: how many of their backward passes ran.
    """

    backward = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, in float32 if it is a norm of half precision; its first result has the dtype of the rows."""
        if func not in PYTORCH_NORMS or args[0].dtype not in HALVES:
            return func(*args, **(kwargs or {}))
        self.backward += func in PYTORCH_BACKWARD
        wide = [x.float() if isinstance(x, Tensor) and x.dtype in HALVES else x for x in args]
        first, *others = func(*wide)
        return None if first is None else first.to(args[0].dtype), *others


class Incoming(torch.autograd.Function):
    """The end of a graph, a number, from which ``dy`` comes in.

    ``torch.autograd.grad`` would import half of PyTorch's compiler to compare the shape of a ``dy`` that it is given.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, dy: Tensor) -> Tensor:
        """Return 0, and keep ``dy`` as it is."""
        ctx.dy = dy
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return ``dy``."""
        return ctx.dy, None


class Backward(NamedTuple):
    """An output, and the gradients of a backward pass from it."""

    output: Tensor
    gradients: dict[str, Tensor]  # by name


def gradients(norm: Built, forward: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """Return the gradients of ``backward`` at a copy of ``x``, which a norm may write into."""
    return backward(norm, forward, x.clone(), dy).gradients


@torch.enable_grad()
def backward(norm: Built, forward: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor, frozen: str = "") -> Backward:
    """Return ``forward(x)``, and its gradients for an incoming ``dy``, by name; 0 where none arrives.

    Args:
        forward: a function that computes with the norm's Parameters.
        frozen: that of "input", "weight" and "bias" that takes no gradient.

    Raises:
        NotSupported: if the norm is a function of arrays that gives no gradients.
    """
    if norm.lacks_gradients:
        raise NotSupported(f"{norm.subject.name} gives no gradients")
    leaves = {"input": x.detach(), **norm.parameters}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name != frozen)
    y = forward(leaves["input"])
    leaves.pop(frozen, None)
    inputs, dy = [*leaves.values()], dy.to(y.dtype)
    with naming(norm.foreign, f"the backward pass of {norm.subject.name}"), on_threads(norm.subject.threads):
        end = Incoming.apply(y, dy)
        values = torch.autograd.grad(end, inputs, allow_unused=True, materialize_grads=True)
    return Backward(y.detach(), dict(zip(leaves, values, strict=True)))


FROZEN = "a frozen tensor takes no gradient, and the others still get theirs"
TWICE = "the bound on values, once for the standardized row and once for its product with the incoming gradient"
GRADIENT_SETTINGS = {
    "dy expanded": (
        "strides of the incoming gradient",
        Input((12, 64), lay_gradient=lambda dy: dy[:1, :1].expand_as(dy)),
    ),
    "input transposed": ("strides of the input", Input((12, 64), lay_input=by_columns)),
    "as tokens": ("rows of several dimensions, as a model has them, in training", Input((2, 6, 64))),
    "as heads": ("rows of four dimensions, in training", Input((2, 3, 2, 64))),
}


def gradient_case(axis: Axis, value: str, tests: str, one: Input) -> Case:
    """Return the case that compares the gradients at an input with float64."""
    name = f"gradients, {axis.named(value)}"
    return Case(name, "gradients", tests, TWICE, partial(of_gradients, one), axis, value)


def gradient_cases() -> list[Case]:
    """Return the cases that compare gradients with float64, in the order in which they run."""
    cases = []
    for name, (tests, one) in GRADIENT_SETTINGS.items():
        cases.append(gradient_case(Axis.GRADIENT, name, tests, one))
    for name in ("input", "weight", "bias"):
        cases.append(gradient_case(Axis.GRADIENT, f"frozen {name}", FROZEN, Input((12, 64), frozen=name)))
    for kind in (*ROW_KINDS, OFF_ZERO):
        if kind.magnitudes is None:
            cases.append(gradient_case(Axis.KIND, kind.name, kind.tests, Input((24, 768), kind)))
    for width, one in rows_of_width().items():
        cases.append(gradient_case(Axis.WIDTH, width, "rows of this width", one))
    by_axis = sizes()
    for size in by_axis[Axis.ROWS]:
        for axis, table in by_axis.items():
            cases.append(gradient_case(axis, size, OF_SIZES, table[size]))
    return cases


GRADIENT_CASES = gradient_cases()


def compiled_values(subject: Subject, dtype: torch.dtype) -> Outcomes:
    """Compare the compiled norm with the eager one, and its gradients.

    A forward pass without a backward pass is compiled in float32 alone: a compilation takes long.
    """
    norm = subject.candidate(768, dtype)
    x = torch.cat([subject.rows(8, 768, dtype=dtype, kind=kind) for kind in (ORDINARY, MASSIVE, CONSTANT)])  # (24, 768)
    dy = subject.rows(*x.shape, dtype=dtype)
    eager = backward(norm, norm, x.clone(), dy)
    with uncollected():
        torch.compiler.reset()  # beyond its limit of recompilations torch.compile would run eagerly
        age()  # the compiler asks for a search among young objects after each program
        compiled = torch.compile(norm.module, backend="aot_eager_default_partitioner", dynamic=False)
        measured = backward(norm, compiled, x.clone(), dy)
        values = {"values in training": (measured.output, eager.output)}
        if dtype == torch.float32:
            values["values"] = compiled(x.clone()), norm(x.clone())
    truth = norm.gradient_truth(x, dy)
    for what, (value, other) in values.items():
        yield compare(what, value, other, 2 * norm.truth(x).bound)
    for name, gradient in measured.gradients.items():
        expected = eager.gradients[name]
        yield compare(f"the gradient of the {name}", gradient, expected, 2 * truth[name].bound, name)


COMPILED = "compiled equals eager"
COMPILE_CASES = [
    Case(
        COMPILED,
        "compile",
        "values and gradients under torch.compile, traced by aot_eager",
        "twice the bound, since either may be off by it",
        compiled_values,
        Axis.BEHAVIOUR,
        COMPILED,
    )
]
