"""Cases as tables of inputs: values, gradients and torch.compile, each against float64."""

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minigpt.conformance.case import Built, Case, Compared, Subject, worst_element
from minigpt.conformance.truth import ORDINARY, PRECISIONS, ROW_KINDS, GradientTruth, RowKind, bound_reason, by_columns
from minigpt.device import DTYPES, HALVES
from minigpt.errors import NormError
from minigpt.norms.foreign.construct import naming

# GPT-2's four, those around the powers of two that kernels are written for, and one that no block of a kernel divides
POWERS = [power + side for power in (32, 64, 128, 256, 512, 1024, 2048, 4096) for side in (-1, 0, 1)]
WIDTHS = sorted({2, 3, 768, 1001, 1280, 1600, *POWERS})
# A block of threads has 256 or 1,024, and CUDA's grid ends at 65,535 in two of its three dimensions
SIZES = (1, 255, 256, 257, 1023, 1024, 1025, 65_535, 65_536, 65_537)
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
}


class Given(NamedTuple):
    """The input of a case.

    Attributes:
        shape: of the rows, (..., width).
        kind: of the rows.
        of_input, of_output: lay out the input, and the incoming gradient, in memory.
        frozen: the name of the tensor that takes no gradient: "input", "weight" or "bias".
    """

    shape: tuple[int, ...]
    kind: RowKind = ORDINARY
    of_input: Callable[[Tensor], Tensor] = lambda x: x
    of_output: Callable[[Tensor], Tensor] = lambda dy: dy
    frozen: str = ""

    def to(self, subject: Subject, dtype: torch.dtype) -> tuple[Built, Tensor]:
        """Return the norm and its input."""
        x = subject.rows(*self.shape, dtype=dtype, kind=self.kind)
        return subject.candidate(self.shape[-1], dtype, weights=self.kind.weights), self.of_input(x)


def values(inputs: list[Given], subject: Subject, dtype: torch.dtype) -> Iterator[Compared]:
    """Compare the norm of each input with float64."""
    for given in inputs:
        norm, x = given.to(subject, dtype)
        yield norm.compared(x, f"shape {given.shape}")


def not_finite(subject: Subject, dtype: torch.dtype) -> Iterator[Compared]:
    """Put a NaN into row 1, an infinity into row 3 and two into row 4."""
    norm, x = Given((6, 64)).to(subject, dtype)
    spoilt = x.clone()
    spoilt[1, 7], spoilt[3, 0], spoilt[4, 5], spoilt[4, 63] = torch.nan, torch.inf, -torch.inf, torch.inf
    y = norm(spoilt)
    if y[[1, 3, 4]].isfinite().all(-1).any():
        raise NormError("it returns finite numbers where torch's layer_norm returns NaN, so it hides a NaN")
    yield Compared("the other rows", y[[0, 2, 5]], norm(x)[[0, 2, 5]], 0)


def bias_and_slope(subject: Subject, dtype: torch.dtype) -> Iterator[Compared]:
    """Measure what no single number shows: errors to one side, and rows that are too long or too short.

    The mean error towards 0 is in units of u: truncation has 1/2 or more, rounding less than 1/50 in 2,048 rows. The
    slope of a row over the true one is 1 up to the rounding of its deviation, and of n results in half precision.
    """
    norm, x = Given((2048, 64)).to(subject, dtype)
    precision = PRECISIONS[dtype]
    y, true = norm(x).cpu().double(), norm.truth(x).values
    error, centred = y - true, true - true.mean(-1, keepdim=True)
    slope = (error * centred).sum(-1) / centred.square().sum(-1)
    to_zero = (error * true.sign()).sum() / true.abs().sum() / precision.result
    yield Compared("mean error towards 0, in roundings", to_zero, torch.zeros(()), 0.25)
    allowed = 16 * precision.statistics + 0.6 * (1 + norm.is_completed) * precision.result * precision.is_half
    yield Compared("slope of a row", slope, torch.zeros(len(x)), allowed)


FLOAT32 = bound_reason(torch.float32)
OF_WIDTHS = "rows of float32, bfloat16 and float16 numbers"
OF_SIZES = "many rows, texts or tokens"
OF_NAN = "a row that holds one is not finite, as with layer_norm"
SAME_BITS = "the other rows must have the same bits as without it"
STRIDES = "the norm follows strides"
THREE = (torch.float32, torch.bfloat16, torch.float16)
TWO = (torch.float32, torch.bfloat16)
LAID_OUT = (torch.float32, torch.bfloat16, torch.float64)


def sizes() -> dict[str, Given]:
    """Return inputs with each size of ``SIZES`` as the number of rows, of texts and of tokens; and one large input."""
    shapes: dict[str, tuple[int, ...]] = {}
    for size in SIZES:
        other, width = (2, 64) if size < 1000 else (2, 16) if size < 2000 else (1, 4)
        shapes |= {f"{size:,} rows": (size, width), f"batch of {size:,}": (size, other, width)}
        shapes[f"sequence of {size:,}"] = (other, size, width)
    return {name: Given(shape) for name, shape in shapes.items()} | {"300 rows of 1,040": Given((300, 1040))}


def dtypes_of(given: Given) -> tuple[torch.dtype, ...]:
    """Return float32, and bfloat16 but for sizes that differ by one or two from one that has it."""
    return TWO[:1] if set(given.shape) & {255, 256, 1023, 1024, 65_535, 65_536} and given.shape[-1] < 100 else TWO


SIZED = sizes()
WIDE = {f"width {width}": Given((33 if width < 1100 else 7, width)) for width in WIDTHS}
VALUE_CASES = [
    *(Case(name, "widths", OF_WIDTHS, FLOAT32, partial(values, [given]), THREE) for name, given in WIDE.items()),
    *(Case(name, "sizes", OF_SIZES, FLOAT32, partial(values, [many]), dtypes_of(many)) for name, many in SIZED.items()),
    *(
        Case(
            f"{name}, {kind.name}", "values", kind.tests, bound_reason(dtype),
            partial(values, [Given((24, 64), kind), Given((24, 768), kind)]), (dtype,),
        )
        for name, dtype in DTYPES.items()
        for kind in ROW_KINDS
    ),
    *(
        Case(
            f"{name}, bias and slope", "values", "the mean of many errors, and the length of a row",
            "a quarter of a rounding; 16 of the statistics", bias_and_slope, (dtype,),
        )
        for name, dtype in DTYPES.items()
    ),
    *(Case(f"{name}, infinity and NaN", "special", OF_NAN, SAME_BITS, not_finite, (DTYPES[name],)) for name in DTYPES),
    *(
        Case(f"{name} input", "layouts", f"input of shape {shape}", FLOAT32, partial(values, [Given(shape)]), LAID_OUT)
        for name, shape in SHAPES.items()
    ),
    *(
        Case(f"non-contiguous: {name}", "layouts", STRIDES, FLOAT32, partial(values, [Given((12, 64), of_input=lay)]))
        for name, lay in LAYOUTS.items()
    ),
]  # fmt: skip


def of_gradients(given: Given, subject: Subject, dtype: torch.dtype) -> Iterator[Compared]:
    """Compare the norm's gradients with float64, and in half precision with PyTorch's own too."""
    norm, x = given.to(subject, dtype)
    norm.module.train()
    dy = given.of_output(subject.rows(*given.shape, dtype=dtype))
    kept = dy.clone()  # a backward pass may write into what comes in
    yield from against_truth(norm, gradients(norm, norm, x, dy, given.frozen), x, kept)


def against_truth(norm: Built, found: dict[str, Tensor], x: Tensor, dy: Tensor) -> Iterator[Compared]:
    """Compare gradients with float64. In half precision, one that has the bits of PyTorch's own is right too.

    On a CPU PyTorch keeps 1 / deviation in half precision, and adds the rows of a gradient up in it. The terms of a
    gradient may be rounded one by one, but the rows of the input's must have their length.
    """
    true = norm.gradient_truth(x, dy)
    by_terms: tuple[str, ...] = ("input", "weight") if norm.is_completed else ()
    if not by_terms and has_length(found.get("input"), true["input"], x.dtype):
        by_terms = ("input",)
    for name in by_terms if x.dtype in HALVES else ():
        more = (2 + norm.is_completed) * PRECISIONS[x.dtype].result * true[name].terms
        true[name] = true[name]._replace(bound=true[name].bound + more)
    wrong = {name for name, gradient in found.items() if worst_element(name, gradient, *true[name][:2]).ratio > 1}
    as_pytorch = set[str]()
    module, rows = norm.module, x[..., 0].numel()
    weight, bias, shape = module.weight, module.bias, module.weight.shape
    inside, complete = (weight, bias), lambda y: y
    if norm.is_completed:
        inside, complete = (None if module.multiplies else weight, None if module.adds else bias), module.completed
    library = [
        lambda x: complete(F.layer_norm(x, shape, *inside, norm.eps)),
        lambda x: F.group_norm(x.reshape(rows, -1), 1, weight, bias, norm.eps).view(x.shape),
    ]
    for function in library if x.dtype in HALVES else []:
        own = gradients(norm, function, x, dy) if wrong else {}
        as_pytorch |= {name for name in wrong if torch.equal(found[name], own[name])}
        wrong -= as_pytorch
    for name, gradient in found.items():
        expected, bound, _ = true[name]
        yield Compared(name, expected if name in as_pytorch else gradient, expected, bound, name)


def has_length(gradient: Tensor | None, true: GradientTruth, dtype: torch.dtype) -> bool:
    """Return True if each row of a gradient is as long as the true one, up to the rounding of its terms.

    A 1 / deviation that is rounded to half makes rows longer or shorter by up to u. Below 256 numbers in a row, the
    rounding of its terms may do that too.
    """
    if gradient is None or gradient.shape[-1] < 256 or not gradient.numel():
        return gradient is not None
    values, _, terms = true
    error, square = gradient.cpu().double() - values, values.square().sum(-1).clamp(min=1e-300)
    slope = (error * values).sum(-1).abs() / square
    noise = terms.square().sum(-1) / square / gradient.shape[-1]
    return bool((slope <= PRECISIONS[dtype].result * (0.25 + 3 * noise.sqrt())).all())


@torch.enable_grad()
def gradients(
    norm: Built, forward: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor, frozen: str = ""
) -> dict[str, Tensor]:
    """Return the gradients of ``forward(x)`` for an incoming ``dy``, by name; 0 where none arrives.

    Args:
        forward: a function that computes with the norm's Parameters.
        frozen: that of "input", "weight" and "bias" that takes no gradient.
    """
    leaves = {"input": x.detach().clone(), **norm.parameters}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name != frozen)
    y = forward(leaves["input"])
    asked = {name: leaf for name, leaf in leaves.items() if name != frozen}
    with naming(norm.foreign, f"the backward pass of {norm.name}"):
        found = torch.autograd.grad(y, [*asked.values()], dy.to(y.dtype), allow_unused=True, materialize_grads=True)
    return dict(zip(asked, found, strict=True))


FROZEN = "a frozen tensor takes no gradient, and the others still get theirs"
STRIDES_BACK = "the backward pass follows the strides of the incoming gradient"
TWICE = "the bound on values, once for the standardized row and once for its product with the incoming gradient"
SETTINGS = {
    "dy expanded": (STRIDES_BACK, Given((12, 64), of_output=lambda dy: dy[:1, :1].expand_as(dy))),
    "input transposed": ("the backward pass follows the strides of the input", Given((12, 64), of_input=by_columns)),
    "as tokens": ("rows of several dimensions, as a model has them, in training", Given((2, 6, 64))),
    **{f"frozen {name}": (FROZEN, Given((12, 64), frozen=name)) for name in ("input", "weight", "bias")},
    **{kind.name: (kind.tests, Given((24, 768), kind)) for kind in ROW_KINDS if kind.magnitudes is None},
}
GRADIENT_CASES = [
    *(
        Case(f"gradients, {name}", "gradients", tests, TWICE, partial(of_gradients, given))
        for name, (tests, given) in SETTINGS.items()
    ),
    *(
        Case(f"gradients, {name}", "gradients", ORDINARY.name, TWICE, partial(of_gradients, Given((24, 768))), (dtype,))
        for name, dtype in DTYPES.items()
        if name != "float32"
    ),
    *(
        Case(f"gradients, {name}", "gradients", OF_SIZES, TWICE, partial(of_gradients, given), dtypes_of(given))
        for name, given in (WIDE | SIZED).items()
    ),
]


def best_backend(device: torch.device) -> str:
    """Return inductor if it can generate code for ``device``, else aot_eager: the same trace, run by PyTorch itself."""
    if device.type == "cpu":
        compilers = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
        return "inductor" if any(map(shutil.which, compilers)) else "aot_eager"
    return "inductor" if importlib.util.find_spec("triton") else "aot_eager"


class Followed(nn.Module):
    """A norm and what a compiler may fuse with it: two functions of each element, and a product."""

    def __init__(self, norm: nn.Module, weight: Tensor) -> None:
        super().__init__()
        self.norm, self.weight = norm, weight  # (C, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.norm(x)
        return y + torch.tanh(y), torch.reciprocal(y.abs() + 1), y @ self.weight


def compiled_values(subject: Subject, dtype: torch.dtype) -> Iterator[Compared]:
    """Compare the compiled norm with the eager one."""
    norm, x = subject.candidate(768, dtype), _mixed_rows(subject, dtype)
    bound, eager = 2 * norm.truth(x).bound, norm(x.clone())
    yield Compared("values compiled with aot_eager", _compiled(norm.module, "aot_eager")(x.clone()), eager, bound)


def compiled_with_more(subject: Subject, dtype: torch.dtype) -> Iterator[Compared]:
    """Compare the norm and what follows it, compiled into one, with the eager ones."""
    norm, x = subject.candidate(768, dtype), _mixed_rows(subject, dtype)
    weight = torch.eye(768, 8) - torch.eye(768).flip(0)[:, :8]
    whole, bound = Followed(norm.module, subject.put(weight, dtype)), 2 * norm.truth(x).bound
    eager, found = whole(x.clone()), _compiled(whole, subject.compile_backend)(x.clone())
    followers = {"y + tanh(y)": 2 * bound, "1 / (|y| + 1)": bound, "y @ weight": bound @ weight.double().abs()}
    for (name, reach), y, expected in zip(followers.items(), found, eager, strict=True):
        rounding = 4 * PRECISIONS[dtype].result * (1 + expected.detach().cpu().double().abs())
        yield Compared(f"{name} compiled with {subject.compile_backend}", y, expected, reach + rounding)


def compiled_gradients(subject: Subject, dtype: torch.dtype) -> Iterator[Compared]:
    """Compare the compiled norm's gradients with the eager one's."""
    norm, x = subject.candidate(768, dtype), _mixed_rows(subject, dtype)
    dy = subject.rows(*x.shape, dtype=dtype)
    eager = gradients(norm, norm, x, dy)
    compiled = gradients(norm, _compiled(norm.module, "aot_eager"), x, dy)
    for name, true in norm.gradient_truth(x, dy).items():
        yield Compared(name, compiled[name], eager[name], 2 * true.bound, name)


def _compiled(module: nn.Module, backend: str) -> Callable[[Tensor], Tensor]:
    """Forget earlier programs and compile: beyond its limit of recompilations torch.compile would run eagerly."""
    torch.compiler.reset()
    return torch.compile(module, backend=backend, dynamic=False)


def _mixed_rows(subject: Subject, dtype: torch.dtype) -> Tensor:
    kinds = [kind for kind in ROW_KINDS if kind.name in ("ordinary rows", "massive activations", "constant rows")]
    return torch.cat([subject.rows(8, 768, dtype=dtype, kind=kind) for kind in kinds])  # (24, 768)


OF_COMPILED = "gradients under torch.compile, traced by aot_eager"
OF_MORE = "values under torch.compile, with functions and a product that read them"
EITHER = "twice the bound, since either may be off by it"
COMPILE_CASES = [
    Case("compiled equals eager", "compile", "values under torch.compile", EITHER, compiled_values, TWO),
    Case("compiled with what follows it", "compile", OF_MORE, EITHER, compiled_with_more),
    Case("compiled gradients equal eager", "compile", OF_COMPILED, EITHER, compiled_gradients),
]
