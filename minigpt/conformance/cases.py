"""Cases as tables of inputs: values, gradients and torch.compile, each against float64."""

import importlib.util
import os
import shutil
from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minigpt.conformance.case import Case, Measurement, against_truth, same_numbers, worst, worst_element
from minigpt.conformance.rows import ORDINARY, ROW_KINDS, RowKind, transposed
from minigpt.conformance.subject import Candidate, Subject
from minigpt.conformance.truth import PRECISIONS, Truth, bound_reason
from minigpt.errors import NormError
from minigpt.norms.add import parts_of
from minigpt.placement import DTYPES

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


def values(*inputs: Given) -> Callable[[Subject, torch.dtype], Measurement]:
    """Return a measure of the norm of each input."""
    return lambda subject, dtype: worst(
        {f"shape {given.shape}": against_truth(*given.to(subject, dtype)) for given in inputs}
    )


@torch.no_grad()
def not_finite(subject: Subject, dtype: torch.dtype) -> Measurement:
    """Put a NaN into row 1, an infinity into row 3 and two into row 4."""
    candidate, x = Given((6, 64)).to(subject, dtype)
    spoilt = x.clone()
    spoilt[1, 7], spoilt[3, 0], spoilt[4, 5], spoilt[4, 63] = torch.nan, torch.inf, -torch.inf, torch.inf
    reference, y = candidate.reference(spoilt), candidate(spoilt)
    if (y.isfinite().all(-1) & ~reference.isfinite().all(-1)).any():
        raise NormError("it returns finite numbers where torch's layer_norm returns NaN, so it hides a NaN")
    return same_numbers(y[[0, 2, 5]], candidate(x)[[0, 2, 5]])


FLOAT32 = bound_reason(torch.float32)
OF_WIDTHS = "rows of float32, bfloat16 and float16 numbers"
OF_ROWS = "rows of 16 float32 numbers"
OF_NAN = "a row that holds one is not finite, as with layer_norm"
SAME_BITS = "the other rows must have the same bits as without it"
STRIDES = "the norm follows strides"
THREE = (torch.float32, torch.bfloat16, torch.float16)
LAID_OUT = (torch.float32, torch.bfloat16, torch.float64)
VALUE_CASES = [
    *(Case(f"width {width}", "widths", OF_WIDTHS, FLOAT32, values(Given((33, width))), THREE) for width in WIDTHS),
    *(Case(f"{count:,} rows", "rows", OF_ROWS, FLOAT32, values(Given((count, 16)))) for count in ROW_COUNTS),
    *(
        Case(
            f"{name}, {kind.name}", "values", kind.tests, bound_reason(dtype),
            values(Given((24, 64), kind), Given((24, 768), kind)), (dtype,),
        )
        for name, dtype in DTYPES.items()
        for kind in ROW_KINDS
    ),
    *(Case(f"{name}, infinity and NaN", "special", OF_NAN, SAME_BITS, not_finite, (DTYPES[name],)) for name in DTYPES),
    *(
        Case(f"{name} input", "layouts", f"input of shape {shape}", FLOAT32, values(Given(shape)), LAID_OUT)
        for name, shape in SHAPES.items()
    ),
    *(
        Case(f"non-contiguous: {name}", "layouts", STRIDES, FLOAT32, values(Given((12, 64), of_input=lay)))
        for name, lay in LAYOUTS.items()
    ),
]  # fmt: skip


def gradients_of(given: Given, subject: Subject, dtype: torch.dtype) -> Measurement:
    """Compare the gradients of the norm with float64 autograd."""
    candidate, x = given.to(subject, dtype)
    candidate.module.train()
    dy = given.of_output(subject.rows(*given.shape, dtype=dtype))
    true = candidate.gradient_truth(x, dy)
    return _measured(gradients(candidate, candidate, x, dy, frozen={given.frozen}), true)


def gradients_of_sum(subject: Subject, dtype: torch.dtype) -> Measurement:
    """Compare the gradients of ``add_norm``, by its sum and by its norm, with float64."""
    candidate, x = Given((12, 64)).to(subject, dtype)
    candidate.module.train()
    dy = subject.rows(12, 64, dtype=dtype)
    true = candidate.gradient_truth(x, dy)
    back = true["input"].values + dy.cpu().double()
    true["input"] = Truth(back, true["input"].bound + 2 * PRECISIONS[dtype].result * back.abs())
    return _measured(gradients(candidate, lambda rows: torch.add(*candidate.add_norm(*parts_of(rows))), x, dy), true)


@torch.enable_grad()
def gradients(
    candidate: Candidate,
    forward: Callable[[Tensor], Tensor],
    x: Tensor,
    dy: Tensor,
    *,
    frozen: Collection[str] = (),
) -> dict[str, Tensor]:
    """Return the gradients of ``forward(x)`` for an incoming ``dy``, by name.

    Args:
        forward: a function that computes with the candidate's Parameters.
        frozen: those of "input", "weight" and "bias" that take no gradient.

    Raises:
        NormError: if one of the others gets no gradient.
    """
    leaves = {"input": x.detach().clone(), **candidate.parameters}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name not in frozen)
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    y = forward(leaves["input"])
    if not y.requires_grad:
        raise NormError("no gradient flows through it")
    found = torch.autograd.grad(y, list(wanted.values()), dy.to(y.dtype), allow_unused=True)
    by_name = {name: gradient for name, gradient in zip(wanted, found, strict=True) if gradient is not None}
    if missing := sorted(wanted.keys() - by_name.keys()):
        raise NormError(f"no gradient reaches its {missing[0]}")
    return by_name


def _measured(found: dict[str, Tensor], true: dict[str, Truth]) -> Measurement:
    return worst({name: worst_element(tensor, *true[name]) for name, tensor in found.items()})


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
        Case(f"gradients, {name}", "gradients", tests, TWICE, partial(gradients_of, given))
        for name, (tests, given) in SETTINGS.items()
    ),
    *(
        Case(f"gradients, {name}", "gradients", ORDINARY.name, TWICE, partial(gradients_of, Given((24, 768))), (dtype,))
        for name, dtype in DTYPES.items()
        if name != "float32"
    ),
    Case("gradients, residual added too", "gradients", OF_SUMS, AND_SUM, gradients_of_sum, THREE[:2]),
]


def best_backend(device: torch.device) -> str:
    """Return inductor if it can generate code for ``device``, else aot_eager: the same trace, run by PyTorch itself."""
    if device.type == "cpu":
        compilers = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
        return "inductor" if any(map(shutil.which, compilers)) else "aot_eager"
    return "inductor" if importlib.util.find_spec("triton") else "aot_eager"


@torch.no_grad()
def compiled_values(subject: Subject, dtype: torch.dtype) -> Measurement:
    """Compare the compiled norm with the eager one."""
    candidate, x = subject.candidate(768), _mixed_rows(subject, dtype)
    bound = 2 * candidate.truth(x).bound
    eager = candidate(x.clone())
    compiled = _compiled(candidate.module, subject.compile_backend)(x.clone())
    return worst_element(compiled, eager, bound)._replace(note=f"compiled with {subject.compile_backend}")


def compiled_gradients(subject: Subject, dtype: torch.dtype) -> Measurement:
    """Compare the compiled norm's gradients with the eager one's."""
    candidate, x = subject.candidate(768), _mixed_rows(subject, dtype)
    dy = subject.rows(*x.shape, dtype=dtype)
    true = candidate.gradient_truth(x, dy)
    eager = gradients(candidate, candidate, x, dy)
    compiled = gradients(candidate, _compiled(candidate.module, "aot_eager"), x, dy)
    return worst({name: worst_element(compiled[name], eager[name], 2 * true[name].bound) for name in true})


def _compiled(module: nn.Module, backend: str) -> Callable[[Tensor], Tensor]:
    """Forget earlier programs and compile: beyond its limit of recompilations torch.compile would run eagerly."""
    torch.compiler.reset()
    return torch.compile(module, backend=backend, dynamic=False)


def _mixed_rows(subject: Subject, dtype: torch.dtype) -> Tensor:
    kinds = [kind for kind in ROW_KINDS if kind.name in ("ordinary rows", "massive activations", "constant rows")]
    return torch.cat([subject.rows(8, 768, dtype=dtype, kind=kind) for kind in kinds])  # (24, 768)


OF_COMPILED = "gradients under torch.compile, traced by aot_eager"
EITHER = "twice the bound of float32, since either may be off by it"
COMPILE_CASES = [
    Case("compiled equals eager", "compile", "values under torch.compile", EITHER, compiled_values),
    Case("compiled gradients equal eager", "compile", OF_COMPILED, EITHER, compiled_gradients),
]
