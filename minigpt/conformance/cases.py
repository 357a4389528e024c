"""Cases as tables of inputs: values, gradients and torch.compile, each against float64."""

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from minigpt.conformance.case import Case, Compared
from minigpt.conformance.rows import ORDINARY, ROW_KINDS, RowKind, transposed
from minigpt.conformance.subject import Candidate, Subject
from minigpt.conformance.truth import PRECISIONS, bound_reason
from minigpt.device import DTYPES
from minigpt.errors import NormError
from minigpt.norms.add import parts_of

# The smallest, those that kernels are written for, GPT-2's four, and some that no block of a kernel divides
WIDTHS = (2, 3, 64, 127, 128, 256, 512, 768, 1001, 1024, 1280, 1600, 4096)
ROW_COUNTS = (0, 1, 65_535, 65_536, 65_537)  # CUDA's grid ends at 65,535 in two of its three dimensions
SHAPES = {
    "2-D": (12, 64),
    "3-D": (3, 4, 64),
    "4-D": (2, 3, 2, 64),
    "no token": (2, 0, 64),
    "one token": (1, 1, 64),
    "decoding": (12, 1, 64),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {  # of 12 rows in memory: (12, 64) -> (..., 64)
    "transposed": transposed,
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
        frozen: the name of the tensor that takes no gradient: "input" or "weight".
    """

    shape: tuple[int, ...]
    kind: RowKind = ORDINARY
    of_input: Callable[[Tensor], Tensor] = lambda x: x
    of_output: Callable[[Tensor], Tensor] = lambda dy: dy
    frozen: str = ""

    def to(self, subject: Subject, dtype: torch.dtype) -> tuple[Candidate, Tensor]:
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
    yield "the other rows", y[[0, 2, 5]], norm(x)[[0, 2, 5]], 0


FLOAT32 = bound_reason(torch.float32)
OF_WIDTHS = "rows of float32, bfloat16 and float16 numbers"
OF_ROWS = "rows of 16 float32 numbers"
OF_NAN = "a row that holds one is not finite, as with layer_norm"
SAME_BITS = "the other rows must have the same bits as without it"
STRIDES = "the norm follows strides"
THREE = (torch.float32, torch.bfloat16, torch.float16)
LAID_OUT = (torch.float32, torch.bfloat16, torch.float64)
VALUE_CASES = [
    *(
        Case(f"width {width}", "widths", OF_WIDTHS, FLOAT32, partial(values, [Given((33, width))]), THREE)
        for width in WIDTHS
    ),
    *(Case(f"{rows:,} rows", "rows", OF_ROWS, FLOAT32, partial(values, [Given((rows, 16))])) for rows in ROW_COUNTS),
    *(
        Case(
            f"{name}, {kind.name}", "values", kind.tests, bound_reason(dtype),
            partial(values, [Given((24, 64), kind), Given((24, 768), kind)]), (dtype,),
        )
        for name, dtype in DTYPES.items()
        for kind in ROW_KINDS
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
    """Compare the norm's gradients with float64."""
    norm, x = given.to(subject, dtype)
    norm.module.train()
    dy = given.of_output(subject.rows(*given.shape, dtype=dtype))
    true = norm.gradient_truth(x, dy)
    for name, gradient in gradients(norm, norm, x, dy, given.frozen).items():
        yield name, gradient, true[name].values, true[name].bound


def of_gradients_of_sum(subject: Subject, dtype: torch.dtype) -> Iterator[Compared]:
    """Compare the gradients of ``add_norm``, by its sum and by its norm, with float64."""
    norm, x = Given((12, 64)).to(subject, dtype)
    norm.module.train()
    dy = subject.rows(12, 64, dtype=dtype)
    found = gradients(norm, lambda rows: torch.add(*norm.add_norm(*parts_of(rows))), x, dy)
    for name, (gradient, bound) in norm.gradient_truth(x, dy).items():
        by_sum = dy.cpu().double() if name == "input" else 0.0
        rounding = 2 * PRECISIONS[dtype].result * (gradient + by_sum).abs()
        yield name, found[name], gradient + by_sum, bound + rounding


@torch.enable_grad()
def gradients(
    norm: Candidate, forward: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor, frozen: str = ""
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
    wanted = {name: leaf for name, leaf in leaves.items() if name != frozen}
    found = torch.autograd.grad(y, [*wanted.values()], dy.to(y.dtype), allow_unused=True, materialize_grads=True)
    return dict(zip(wanted, found, strict=True))


MANY = "every row and column, in sizes that no block of a kernel divides"
FROZEN = "a frozen tensor takes no gradient, and the others still get theirs"
STRIDES_BACK = "the backward pass follows the strides of the incoming gradient"
OF_SUMS = "gradients through add_norm, if it has one, by its sum and by its norm"
TWICE = "the bound on values, once for the standardized row and once for its product with the incoming gradient"
AND_SUM = f"{TWICE}, and the addition of what comes back by the sum"
SETTINGS = {
    "dy expanded": (STRIDES_BACK, Given((12, 64), of_output=lambda dy: dy[:1, :1].expand_as(dy))),
    "input transposed": ("the backward pass follows the strides of the input", Given((12, 64), of_input=transposed)),
    "as tokens": ("rows of several dimensions, as a model has them, in training", Given((2, 6, 64))),
    "1,000 rows": (MANY, Given((1000, 64))),
    "width 1001": (MANY, Given((7, 1001))),
    "frozen weight": (FROZEN, Given((12, 64), frozen="weight")),
    "frozen input": (FROZEN, Given((12, 64), frozen="input")),
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
    Case("gradients, residual added too", "gradients", OF_SUMS, AND_SUM, of_gradients_of_sum, THREE[:2]),
]


def best_backend(device: torch.device) -> str:
    """Return inductor if it can generate code for ``device``, else aot_eager: the same trace, run by PyTorch itself."""
    if device.type == "cpu":
        compilers = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
        return "inductor" if any(map(shutil.which, compilers)) else "aot_eager"
    return "inductor" if importlib.util.find_spec("triton") else "aot_eager"


def compiled_values(subject: Subject, dtype: torch.dtype) -> Iterator[Compared]:
    """Compare the compiled norm with the eager one."""
    norm, x = subject.candidate(768), _mixed_rows(subject, dtype)
    bound, eager = 2 * norm.truth(x).bound, norm(x.clone())
    compiled = _compiled(norm, subject.compile_backend)(x.clone())
    yield f"values compiled with {subject.compile_backend}", compiled, eager, bound


def compiled_gradients(subject: Subject, dtype: torch.dtype) -> Iterator[Compared]:
    """Compare the compiled norm's gradients with the eager one's."""
    norm, x = subject.candidate(768), _mixed_rows(subject, dtype)
    dy = subject.rows(*x.shape, dtype=dtype)
    eager = gradients(norm, norm, x, dy)
    compiled = gradients(norm, _compiled(norm, "aot_eager"), x, dy)
    for name, true in norm.gradient_truth(x, dy).items():
        yield name, compiled[name], eager[name], 2 * true.bound


def _compiled(norm: Candidate, backend: str) -> Callable[[Tensor], Tensor]:
    """Forget earlier programs and compile: beyond its limit of recompilations torch.compile would run eagerly."""
    torch.compiler.reset()
    return torch.compile(norm.module, backend=backend, dynamic=False)


def _mixed_rows(subject: Subject, dtype: torch.dtype) -> Tensor:
    kinds = [kind for kind in ROW_KINDS if kind.name in ("ordinary rows", "massive activations", "constant rows")]
    return torch.cat([subject.rows(8, 768, dtype=dtype, kind=kind) for kind in kinds])  # (24, 768)


OF_COMPILED = "gradients under torch.compile, traced by aot_eager"
EITHER = "twice the bound of float32, since either may be off by it"
COMPILE_CASES = [
    Case("compiled equals eager", "compile", "values under torch.compile", EITHER, compiled_values),
    Case("compiled gradients equal eager", "compile", OF_COMPILED, EITHER, compiled_gradients),
]
