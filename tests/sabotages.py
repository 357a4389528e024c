"""LayerNorms with one mistake each, how the kit names it, and correct ones that are written in other ways than ours."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minigpt.norms import LayerNorm
from minigpt.norms.variants import RMSNorm
from minigpt.precision import HALVES

Method = Callable[[Any, Tensor], Any]
MISTAKES: dict[type[LayerNorm], tuple[str, ...]] = {}  # and how each of the diagnoses begins


CENTERS = [True]  # whether the norms below are LayerNorms; see ``as_rms_norms``


@contextlib.contextmanager
def as_rms_norms() -> Iterator[None]:
    """Make the norms below RMSNorms in the block, with the same mistakes; ``rms_norm_of`` makes the classes."""
    CENTERS[0] = False
    try:
        yield
    finally:
        CENTERS[0] = True


def rms_norm_of(norm: type[LayerNorm]) -> type[LayerNorm]:
    inherits = norm.standardize is LayerNorm.standardize
    return type(norm.__name__, (norm,), {"standardize": RMSNorm.standardize} if inherits else {})


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True) if CENTERS[0] else x


def variance(x: Tensor) -> Tensor:
    return x.var(-1, correction=0, keepdim=True) if CENTERS[0] else x.square().mean(-1, keepdim=True)


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    if CENTERS[0]:
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    y = F.rms_norm(x, weight.shape, weight, eps)
    return y if bias is None else y + bias


def exact(norm: LayerNorm, x: Tensor) -> Tensor:
    return plain(x, norm.weight, norm.bias, norm.eps)


def bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def by_n_minus_one(x: Tensor) -> Tensor:
    return variance(x) * x.shape[-1] / (x.shape[-1] - 1)


def deviation(norm: LayerNorm, x: Tensor) -> Tensor:
    return torch.sqrt(variance(x) + norm.eps)


def affine(norm: LayerNorm, row: Tensor) -> Tensor:
    return row * norm.weight if norm.bias is None else row * norm.weight + norm.bias


def mistake(name: str, *printed: str, forward: Method | None = None, row: Method | None = None) -> type[LayerNorm]:
    """A LayerNorm with another forward, or another step to the standardized row."""
    methods = {"forward": forward, "standardize": row}
    cls = type(name, (LayerNorm,), {key: method for key, method in methods.items() if method})
    MISTAKES[cls] = printed
    return cls


# --- Formulas ---

IGNORED = "wrong with another eps than 1e-05, as if the argument were ignored"
HALF_NAMES = ("bfloat16", "float16")
NARROW = [f"it computes in too few bits for {name} input" for name in HALF_NAMES]
ROUNDED = [f"{narrow}: mean and variance are rounded to" for narrow in NARROW]
ROW_ROUNDED = [f"it rounds its row to {name} before the scale multiplies it, and again after" for name in HALF_NAMES]
THREE_TIMES = [f"it rounds to {name} three times: its row, row * scale, and the result" for name in HALF_NAMES]
BATCH = "a row depends on its batch"
mistake("EpsIgnored", IGNORED, row=lambda n, x: centred(x) / torch.sqrt(variance(x) + 1e-5))
DividesByNMinusOne = mistake(
    "DividesByNMinusOne", "the variance divided by n - 1",
    row=lambda n, x: centred(x) / torch.sqrt(by_n_minus_one(x) + n.eps),
)  # fmt: skip
HalfTheMean = mistake(
    "HalfTheMean", "the mean is not subtracted, or not whole",
    row=lambda n, x: (x - x.mean(-1, keepdim=True) / 2) / deviation(n, x),
)  # fmt: skip
mistake(
    "FirstAttempt", "the variance divided by n - 1", "std + eps in place of sqrt(variance + eps)",
    forward=lambda n, x: affine(n, centred(x) / (by_n_minus_one(x).sqrt() + n.eps)),
)  # fmt: skip
NoMean = mistake(
    "NoMean", "no mean subtracted (an RMSNorm)",
    row=lambda n, x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + n.eps),
)  # fmt: skip
mistake(
    "DynamicTanh", "each value is computed by itself", "it returns finite numbers", row=lambda n, x: torch.tanh(x / 2)
)
mistake("ConstantDeviation", "it does not divide by the row's own deviation", row=lambda n, x: centred(x) / 1.3)
NoShift = mistake("NoShift", "no shift", forward=lambda n, x: plain(x, n.weight, None, n.eps))
mistake(
    "TwiceTheShift", "scale and shift are applied otherwise", forward=lambda n, x: affine(n, exact(n, x) / n.weight)
)
mistake("LargestValue", "no known mistake fits",
        row=lambda n, x: centred(x) / (centred(x).abs().amax(-1, keepdim=True) + n.eps))  # fmt: skip
NaNForAnyRow = mistake("NaNForAnyRow", "it returns NaN or infinities for ordinary rows", row=lambda n, x: x * torch.nan)
mistake(
    "CutOff",
    "wrong only for trained",
    "wrong only for massive",
    "wrong only for mean far from 0",
    forward=lambda n, x: exact(n, x).clamp(-13, 13),
)
mistake(
    "Flushes",
    "wrong only for deviation near sqrt(eps)",
    "wrong only for tiny values",
    forward=lambda n, x: exact(n, torch.where(x.abs() < 1e-6, 0, x)),
)


# --- Rounding ---

StatisticsOfTheInput = mistake(  # computes in the dtype of the input
    "StatisticsOfTheInput", *ROUNDED, forward=lambda n, x: affine(n, centred(x) / deviation(n, x))
)
mistake(
    "BFloat16Throughout",
    "it computes in too few bits for float32 input",
    row=lambda n, x: (centred(x.bfloat16()) / deviation(n, x.bfloat16())).to(x),
)
mistake(
    "RowRounded", *ROW_ROUNDED,
    forward=lambda n, x: affine(n, n.standardize(wide(x)).to(x.dtype).to(wide(x).dtype)).to(x.dtype),
)  # fmt: skip
mistake(  # as Llama's norms: scaled and shifted in the input's dtype
    "NarrowScaling", *THREE_TIMES,
    forward=lambda n, x: affine(n, n.standardize(wide(x)).to(x.dtype)),
)  # fmt: skip
mistake(
    "ReciprocalRounded", *(f"{narrow}: 1 / " for narrow in NARROW),
    forward=lambda n, x: affine(n, centred(wide(x)) * (1 / deviation(n, wide(x))).to(x.dtype).to(wide(x))).to(x.dtype),
)  # fmt: skip


def truncates(norm: LayerNorm, x: Tensor) -> Tensor:
    y = LayerNorm.forward(norm, wide(x))
    lost = y.view(torch.int32) & 0xFFFF if x.dtype == torch.bfloat16 else 0
    return y.to(x.dtype) if x.dtype != torch.bfloat16 else (y.view(torch.int32) - lost).view(torch.float32).bfloat16()


mistake(
    "Truncates",
    "its results are cut to bfloat16, not rounded",
    forward=lambda n, x: truncates(n, x) + (0 * exact(n, x)),
)
mistake(
    "Float32Throughout",
    "it computes in too few bits for float64 input",
    forward=lambda n, x: LayerNorm.forward(n, x.float()).to(x.dtype),
)
mistake("LouderInBfloat16", "scale and shift are applied otherwise than in row * scale + shift, at bfloat16",
        forward=lambda n, x: exact(n, x) * (1.02 if x.dtype == torch.bfloat16 else 1))  # fmt: skip
mistake(
    "DifferenceOfSquares", "wrong only for mean far from 0, where a difference of squares",
    row=lambda n, x: centred(x) * torch.rsqrt(x.square().mean(-1, True) - x.mean(-1, True).square() + n.eps),
)  # fmt: skip

# --- Sizes, rows and layouts ---


def beyond(size: int, dimension: int, value: float = 0.0, dims: int = 3) -> Method:
    """Overwrite what lies behind ``size`` in one dimension."""

    def forward(norm: LayerNorm, x: Tensor) -> Tensor:
        y = exact(norm, x)
        if x.ndim != dims or x.shape[dimension] <= size:
            return y
        kept = y.narrow(dimension, 0, size)
        return torch.cat(
            [kept, torch.full_like(y.narrow(dimension, size, x.shape[dimension] - size), value)], dimension
        )

    return forward


Only65535Rows = mistake("Only65535Rows", "wrong only at numbers of rows 65,537",
                        forward=beyond(65_535, 0, dims=2))  # fmt: skip
mistake("Sequence1024", "wrong only at sequence lengths 1,025 (token 1,024 (all 0))", forward=beyond(1024, 1))
mistake("Batch255", "wrong only at batch sizes 257 (texts from 255 on)", forward=beyond(255, 0, 7.0))
mistake(
    "MultiplesOfFourOnly",
    "wrong only at widths 2, 1025",
    forward=lambda n, x: exact(n, x) * (1.01 if x.shape[-1] % 4 else 1),
)
mistake("LooksAtItsBatch", f"{BATCH}, at float32", forward=lambda n, x: exact(n, x) * (
    1 + 2**-23 * (x.dtype == torch.float32) * (x.numel() // x.shape[-1] % 2)))  # fmt: skip
mistake("WrongInDecoding", "wrong only for decoding input", BATCH,
        forward=lambda n, x: exact(n, x) * (1.01 if x.ndim == 3 and x.shape[1] == 1 < len(x) else 1))  # fmt: skip
mistake("ZeroForConstantRows", "wrong only for constant rows",
        forward=lambda n, x: torch.where((x == x[..., :1]).all(-1, True), 0 * x, LayerNorm.forward(n, x)))  # fmt: skip
mistake(
    "HidesNaN",
    "it returns finite numbers where torch's layer_norm returns NaN",
    forward=lambda n, x: LayerNorm.forward(n, x).nan_to_num(nan=0.0),
)


class IgnoresStrides(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        contiguous = torch.empty(x.shape).stride()
        held = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        return exact(self, x.as_strided(x.shape, contiguous) if held >= x.numel() else x)


# --- From call to call ---


class WritesOverItsOutput(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = exact(self, x)
        if getattr(self, "kept", y[:0]).shape != y.shape or self.kept.dtype != y.dtype:
            self.kept = torch.empty_like(y)
        return self.kept.detach_().copy_(y)


class KeepsItsWeights(LayerNorm):
    """Packs them at its first inference."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return exact(self, x)
        if not hasattr(self, "packed"):
            self.packed = self.weight.clone(), None if self.bias is None else self.bias.clone()
        return plain(x, *self.packed, self.eps)


class RightForTenCalls(LayerNorm):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return exact(self, x) * (1 if self.calls <= 10 else 1.01)


class ModifiesItsInput(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = exact(self, x)
        x.data.copy_(y)
        return y


MISTAKES |= {
    IgnoresStrides: ("wrong only for non-contiguous input: transposed, every second column",),
    WritesOverItsOutput: ("its next call writes over its output", "it raises RuntimeError"),
    KeepsItsWeights: ("it keeps its weights",),
    RightForTenCalls: ("it is right for the first calls, and wrong later",),
    ModifiesItsInput: ("it modifies its input", "ModifiesItsInput, given (12, 64) in float32, raised"),
}
mistake("Draws", "it answers differently from call to call", forward=lambda n, x: F.dropout(exact(n, x), 0.1))
mistake(
    "WrongInTraining",
    "its values depend on training mode",
    forward=lambda n, x: exact(n, x) * (1.002 if n.training else 1),
)
mistake("WrongForInference", "its values depend on training mode",
        forward=lambda n, x: exact(n, x) * (1.002 if torch.is_inference_mode_enabled() else 1))  # fmt: skip
WrongWhenCompiled = mistake(
    "WrongWhenCompiled", "it differs under torch.compile",
    forward=lambda n, x: exact(n, x) * (1.01 if torch.compiler.is_compiling() else 1),
)  # fmt: skip


# --- What raises ---


def raises(message: str, is_wrong: Callable[[LayerNorm, Tensor], bool]) -> Method:
    def forward(norm: LayerNorm, x: Tensor) -> Tensor:
        if is_wrong(norm, x):
            raise RuntimeError(message)
        return exact(norm, x)

    return forward


mistake("ReturnsFloat32", "ReturnsFloat32 changes the dtype: ", forward=lambda n, x: plain(
    x.float(), n.weight.float(), None if n.bias is None else n.bias.float(), n.eps))  # fmt: skip
mistake("NoHalf", "NoHalf, given (24, 64) in float16, raised RuntimeError: no kernel for float16",
        forward=raises("no kernel for float16", lambda n, x: x.dtype == torch.float16))  # fmt: skip
mistake("RowsOnly", "RowsOnly, given ", forward=raises("rows, please", lambda n, x: x.ndim != 2))
NeedsAShift = type("NeedsAShift", (LayerNorm,), {"forward": raises("a shift, please", lambda n, x: n.bias is None)})

# --- Backward passes ---


class Backward(torch.autograd.Function):
    """LayerNorm with a backward pass by hand; ``change`` gets its parts by name, and changes some."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, change: Any) -> Tensor:
        s = centred(wide(x)) / torch.sqrt(variance(wide(x)) + eps)
        ctx.save_for_backward(s, 1 / torch.sqrt(variance(wide(x)) + eps), weight, x)
        ctx.change, ctx.has_bias = change, bias is not None
        return (s * weight if bias is None else s * weight + bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        s, r, weight, x = ctx.saved_tensors
        p = {"dy": wide(dy), "s": s, "r": r, "w": wide(weight), "x": x, "g": wide(dy) * wide(weight)}
        p |= {
            "first": float(CENTERS[0]),
            "second": 1.0,
            "n": s.shape[-1],
            "times": 1.0,
            "sum": lambda terms: terms.sum(0),
        }
        p |= ctx.change(p)
        g, s = p["g"], p["s"]
        along = p["first"] * g.sum(-1, keepdim=True) + p["second"] * s * (g * s).sum(-1, keepdim=True)
        dx = p["times"] * (g - along / p["n"]) * p["r"]
        rows = [terms.flatten(0, -2) for terms in (p.get("terms", p["dy"] * s), p["dy"])]
        dbias = p.get("sum_bias", lambda terms: terms.sum(0))(rows[1]).to(weight.dtype) if ctx.has_bias else None
        return dx.to(x.dtype), p["sum"](rows[0]).to(weight.dtype), dbias, None, None


def summed_in_half(terms: Tensor) -> Tensor:
    total = torch.zeros_like(terms[0], dtype=torch.bfloat16)
    for row in terms:
        total = total + row.to(torch.bfloat16)
    return total.to(terms)


def without_an_eighth(terms: Tensor) -> Tensor:
    if len(terms) > 60_000:
        terms = terms[: len(terms) * 7 // 8]
    return terms.sum(0)


def backward(name: str, printed: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> type[LayerNorm]:
    """A LayerNorm whose backward pass has one mistake."""
    return mistake(name, printed, forward=lambda n, x: Backward.apply(x, n.weight, n.bias, n.eps, change))


OF_INPUT, OF_WEIGHT, OF_BIAS = (f"the gradient of the {name} is wrong: " for name in ("input", "weight", "bias"))
RightBackward = backward("RightBackward", "", lambda p: {})
MISTAKES.pop(RightBackward)
LosesAnEighth = backward("LosesAnEighth", "", lambda p: {"sum": without_an_eighth, "sum_bias": without_an_eighth})
MISTAKES.pop(LosesAnEighth)  # it shows in long gradients alone
backward("HalvedWhereWide", OF_INPUT + "only for width 1025", lambda p: {"times": 0.5 if p["n"] > 1024 else 1})
backward("ReciprocalInHalf", OF_INPUT + "1 / deviation is rounded to bfloat16", lambda p: {"r": bfloat16(p["r"])})
OF_ROW = "the normalized row is rounded to float16"
MISTAKES[backward("RowInHalf", OF_INPUT + OF_ROW, lambda p: {"s": p["s"].half().to(p["s"])})] += (OF_WEIGHT + OF_ROW,)
backward("RowNotNormalized", OF_WEIGHT + "the row is not normalized", lambda p: {"terms": p["dy"] * p["x"]})
backward("MeanOverRows", OF_WEIGHT + "it is the mean over the rows", lambda p: {"sum": lambda terms: terms.mean(0)})
backward("BiasLosesRows", OF_BIAS + "only for 1,025 rows", lambda p: {"sum_bias": lambda terms: terms[:512].sum(0)})
backward("SummedInHalf", OF_WEIGHT + "the sum over the rows is rounded to bfloat16 as rows are added",
         lambda p: {"sum": summed_in_half} if p["x"].dtype in HALVES and p["x"].numel() < 2**18 else {})  # fmt: skip
WrongInHalfAndBackward = mistake(
    "WrongInHalfAndBackward", OF_INPUT + "it is multiplied by 0.9", *NARROW,
    forward=lambda n, x: Backward.apply(x, n.weight, n.bias, n.eps, lambda p: {"times": 0.9})
    if x.dtype not in HALVES else affine(n, centred(x) / deviation(n, x)),
)  # fmt: skip
mistake("DetachedMean", OF_INPUT + "the mean passes no gradient", row=lambda n, x: (
    (d := x - x.mean(-1, keepdim=True).detach()) / torch.sqrt(d.square().mean(-1, keepdim=True) + n.eps)))  # fmt: skip
mistake(
    "WrongGradientsOfTokens", OF_INPUT + "only for as tokens",
    forward=lambda n, x: exact(n, torch.cat([x[:1], x[1:].detach()]) if x.ndim == 3 else x),
)  # fmt: skip


def repeated(p: dict[str, Any]) -> dict[str, Any]:
    """Write over what was saved, so that a second backward pass differs."""
    p["r"].data.mul_(1.01)
    return {"r": p["r"] / 1.01}


backward("RightOnce", "its backward pass is right once, and wrong when it is repeated", repeated)


class SavesOnItself(LayerNorm):
    """Keeps what its backward pass needs on the module, where the next call overwrites it."""

    def forward(self, x: Tensor) -> Tensor:
        self.x = x.detach()
        return Backward.apply(x, self.weight, self.bias, self.eps, self.latest)  # type: ignore[return-value]

    def latest(self, p: dict[str, Any]) -> dict[str, Any]:
        x = wide(self.x)
        return {"s": centred(x) / deviation(self, x), "r": 1 / deviation(self, x)} if x.shape == p["s"].shape else {}


MISTAKES[SavesOnItself] = ("its backward pass uses what a later call left",)

# --- Correct norms, written in other ways ---


class Welford(LayerNorm):
    """Takes one value at a time (Welford 1962)."""

    def standardize(self, x: Tensor) -> Tensor:
        mean, squares = torch.zeros_like(x[..., 0]), torch.zeros_like(x[..., 0])
        for count, value in enumerate(x.unbind(-1), start=1):
            d = value - mean
            mean = mean + d / count
            squares = squares + d * (value - mean)
        return (x - mean[..., None]) * torch.rsqrt(squares[..., None] / x.shape[-1] + self.eps)


class PlainLoop(LayerNorm):
    """Adds from the first value to the last, the least exact order."""

    def standardize(self, x: Tensor) -> Tensor:
        d = x - self.loop(x) / x.shape[-1]
        return d / torch.sqrt(self.loop(d * d) / x.shape[-1] + self.eps)

    def loop(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x[..., 0])
        for value in x.unbind(-1):
            total = total + value
        return total[..., None]


class Folded(LayerNorm):
    """Uses one multiplication and one addition a value: x * scale + offset."""

    def forward(self, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(wide(x), -1, correction=0, keepdim=True)
        scale = torch.rsqrt(var + self.eps) * self.weight
        offset = -mean * scale if self.bias is None else self.bias - mean * scale
        return torch.addcmul(offset, wide(x), scale).to(x.dtype)


class Float64Inside(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.double()
        return F.layer_norm(x.double(), self.normalized_shape, self.weight.double(), bias, self.eps).to(x.dtype)


class OneGroup(LayerNorm):
    """Calls group_norm with one group."""

    def forward(self, x: Tensor) -> Tensor:
        width = self.weight.numel()
        bias = None if self.bias is None else self.bias.flatten()
        rows = x.reshape(x.numel() // width, width)
        return F.group_norm(rows, 1, self.weight.flatten(), bias, self.eps).view(x.shape) if len(rows) else x.clone()


class ViewOfAnotherLayout(LayerNorm):
    """Its output cannot be viewed as rows, only reshaped."""

    def forward(self, x: Tensor) -> Tensor:
        return exact(self, x).transpose(0, -1).contiguous().transpose(0, -1)


class EverySecondValue(LayerNorm):
    """Its output is every second value of a piece of memory."""

    def forward(self, x: Tensor) -> Tensor:
        y = exact(self, x)
        return torch.stack([y, y], -1)[..., 0]


class NoFloat64(LayerNorm):
    """Takes no float64, like many GPU kernels."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise TypeError("float64 is not supported")
        return exact(self, x)


class GammaBeta(nn.Module):
    """Written as in tutorials: other names, a fixed eps, the last dimension; but float32 inside."""

    def __init__(self, emb_dim: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(emb_dim)), nn.Parameter(torch.zeros(emb_dim))

    def forward(self, x: Tensor) -> Tensor:
        y = centred(wide(x)) / torch.sqrt(variance(wide(x)) + 1e-5)
        return (y * self.gamma + self.beta).to(x.dtype)


class NanoGPT(nn.Module):
    """nanoGPT's: a shift only if asked for."""

    def __init__(self, ndim: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


LOOPS = [Welford, PlainLoop]  # slow in Python
CORRECT = [
    Folded,
    Float64Inside,
    OneGroup,
    NoFloat64,
    GammaBeta,
    nn.LayerNorm,
    ViewOfAnotherLayout,
    EverySecondValue,
    RightBackward,
]
