"""The affine product of a few tokens: what decoding spends its time on, and which call of the library does it best.

R rows: every token of a batch is one. With few of them the time is that of reading the weights once, if the call lets
it be.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from minigpt.processor import HAS_BFLOAT16, HAS_ONEDNN, MIXES_MKL, PREFERS_ONEDNN, SLOW_HALVES

FEW = range(7, 33)  # numbers of rows for which MKL computes W^T x^T faster than x W, the weight lying by rows
# And those for which it does without AVX-512, the weight as in a checkpoint: oneDNN is faster below, and x W above.
SIDEWAYS = range(40, 200)
DOTS = (0, 1, 2, 3)  # numbers of rows for which a weight of halves, by rows, is multiplied sooner than converted
FAST_LINEAR = (*SLOW_HALVES, torch.bfloat16) if HAS_BFLOAT16 else SLOW_HALVES  # dtypes that want ``F.linear`` itself
SLABS = 8  # pieces of a weight for the threads to read, each from start to end
LARGE = 2**18  # values of a weight from which on that pays
PIECE = 2048  # columns whose weights, in float32, still are in the cache when they are multiplied

linear_pointwise: Any = torch.ops.mkldnn._linear_pointwise.default if HAS_ONEDNN else None  # oneDNN's ``F.linear``


def product(
    x: Float[Tensor, "batch seq inp"], weight: Float[Tensor, "inp out"], bias: Float[Tensor, " out"] | None = None
) -> Float[Tensor, "batch seq out"]:
    """``x W + b`` by the fastest of its equals, for this processor and the way ``W`` lies: as (in, out), or by rows."""
    rows = x.reshape(-1, x.shape[-1])  # (R, in)
    if _suits_onednn(x, weight):
        if MIXES_MKL and (call := _faster_by_mkl(rows, weight)):
            return call(rows, weight, bias).contiguous().view(*x.shape[:-1], -1)
        return onednn_linear(x, weight.t(), bias)
    if _suits_float32(rows, weight):
        return in_float32(x, weight, bias)
    if _suits_a_compiler(x) and known_length(rows) == 1:
        return written_out(rows, weight, bias).view(*x.shape[:-1], -1)
    lies_by_rows = weight.t().is_contiguous() and not weight.is_contiguous()
    y = _linear(rows, weight.t(), bias) if lies_by_rows else straight(rows, weight, bias)  # (R, out)
    return y.reshape(*x.shape[:-1], -1)


def straight(
    x: Float[Tensor, "rows inp"], weight: Float[Tensor, "inp out"], bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "rows out"]:
    """The same by the library's own ``x W + b``."""
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


def sideways(
    x: Float[Tensor, "rows inp"], weight: Float[Tensor, "inp out"], bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "rows out"]:
    """The same as ``W^T x^T + b``. The result lies by columns, not by rows as others do."""
    rows, columns = weight.t(), x.t()  # (out, in), (in, R)
    return (torch.mm(rows, columns) if bias is None else torch.addmm(bias[:, None], rows, columns)).t()


def written_out(
    x: Float[Tensor, "1 inp"], weight: Float[Tensor, "inp out"], bias: Float[Tensor, " out"] | None
) -> Float[Tensor, " out"]:
    """The same as a sum of products, of which a compiler makes one loop with whatever comes before and after it."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = (x.t().to(wide) * weight.to(wide)).sum(0)  # (out)
    return (y if bias is None else y + bias).to(x.dtype)


def in_slabs(
    x: Float[Tensor, "1 inp"], weight: Float[Tensor, "inp out"], bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "1 out"]:
    """The same as the sum of the products of some of the values of ``x`` with as many rows of the weight at a time."""
    slabs = weight.view(SLABS, -1, weight.shape[1])  # (S, in / S, out)
    bmm = torch.ops.minigpt.bmm if torch.compiler.is_compiling() else torch.bmm  # a compiler has slower loops for it
    y = bmm(x.reshape(SLABS, 1, -1), slabs).sum(0)  # (S, 1, out) -> (1, out)
    return y if bias is None else y + bias


def in_float32(
    x: Float[Tensor, "batch seq inp"], weight: Float[Tensor, "inp out"], bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "batch seq out"]:
    """The same by products in float32, rounded once, of a piece of the weight after the other."""
    wide, count = x.float(), -(-weight.shape[1] // PIECE)
    shifts = itertools.repeat(None) if bias is None else bias.float().chunk(count)
    pieces = zip(weight.chunk(count, dim=1), shifts, strict=False)
    return torch.cat([product(wide, columns.float(), shift).to(x.dtype) for columns, shift in pieces], dim=-1)


def onednn_linear(
    x: Float[Tensor, "*dims inp"], weight: Float[Tensor, "out inp"], bias: Float[Tensor, " out"] | None
) -> Float[Tensor, "*dims out"]:
    """``F.linear`` by oneDNN, which takes a weight as it lies. It is for inference mode: it has no derivative."""
    if torch.compiler.is_compiling():  # the compiler would have the weight be a constant of its program
        return torch.ops.minigpt.onednn_linear(x, weight, bias)
    return _onednn_linear(x, weight, bias)


def _onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Without asking whether a compiler is at work: one may be, in another thread."""
    if bias is not None and not bias.is_contiguous():
        bias = bias.contiguous()  # else it would be read as if it were
    return linear_pointwise(x, weight, bias, "none", [], "")


def _linear(x: Float[Tensor, "rows inp"], rows: Float[Tensor, "out inp"], bias: Tensor | None) -> Tensor:
    """``F.linear`` with ``rows`` contiguous."""
    count = known_length(x)
    if not x.is_cpu or count not in (1, *FEW) or x.dtype in FAST_LINEAR:
        return F.linear(x, rows, bias)
    if count == 1:
        y = torch.mv(rows, x[0]) if bias is None else torch.addmv(bias, rows, x[0])  # (out)
        return y[None]
    return sideways(x.t().contiguous().t(), rows.t(), bias)


def known_length(rows: Float[Tensor, "rows inp"]) -> int | None:
    """None where a program is exported, which is for any number of them: to ask would make it for this one."""
    # ``is_exporting()`` is True in whatever a compiler reads before torch 2.13, exported or not.
    return None if torch.compiler._is_exporting_flag else len(rows)


def _suits_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN is the faster one, and may take this product."""
    may = x.is_cpu and x.dtype == weight.dtype == torch.float32 and _asks_no_derivative()
    return PREFERS_ONEDNN and may and not torch.is_autocast_enabled("cpu")


def _faster_by_mkl(rows: Tensor, weight: Tensor) -> Callable[[Tensor, Tensor, Tensor | None], Tensor] | None:
    """MKL's way that beats oneDNN without AVX-512, for one row in slabs or for many; None where there is none.

    A weight that lies by rows, as the head's does, is oneDNN's. A compiler is not asked for many rows: it would make
    one program for fewer, and another.
    """
    count = known_length(rows)
    if not weight.is_contiguous():
        return None
    if count == 1:
        return in_slabs if len(weight) % SLABS == 0 and weight.numel() >= LARGE else None
    if count is None or torch.compiler.is_compiling() or count < SIDEWAYS.start:
        return None
    return sideways if count in SIDEWAYS else straight


def _suits_float32(rows: Tensor, weight: Tensor) -> bool:
    """Whether the processor is slow at this half precision, and converts the weight sooner than it multiplies it."""
    is_slow = rows.dtype in SLOW_HALVES and rows.dtype == weight.dtype and rows.is_cpu
    return is_slow and only_infers(rows) and not (weight.t().is_contiguous() and known_length(rows) in DOTS)


def _suits_a_compiler(x: Tensor) -> bool:
    """Whether one row is better left to a compiler's own loops than to the library's kernel: for inference on a GPU."""
    return x.is_cuda and only_infers(x) and torch.compiler.is_compiling()


def only_infers(x: Tensor) -> bool:
    """Whether nobody asks for a derivative, nor for another dtype than that of ``x``."""
    return not (torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type))


def _asks_no_derivative() -> bool:
    if torch.compiler.is_compiling():  # the compiler cannot ask for the inference mode
        return not torch.is_grad_enabled()
    return torch.is_inference_mode_enabled()


torch.library.define("minigpt::bmm", "(Tensor x, Tensor y) -> Tensor")
torch.library.impl("minigpt::bmm", "cpu", torch.bmm)


@torch.library.register_fake("minigpt::bmm")
def _bmm_shape(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:2], y.shape[2])


torch.library.define("minigpt::onednn_linear", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
torch.library.impl("minigpt::onednn_linear", "cpu", _onednn_linear)


@torch.library.register_fake("minigpt::onednn_linear")
def _onednn_linear_shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))
