"""LayerNorms with one mistake each, and correct ones written in other ways than ours."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minigpt.norms import LayerNorm


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def variance(x: Tensor) -> Tensor:
    return x.var(-1, correction=0, keepdim=True)


def exact(norm: LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


# --- One mistake each ---


class Eps1e6(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return centred(x) / torch.sqrt(variance(x) + 1e-6)


class Eps1e4(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return centred(x) / torch.sqrt(variance(x) + 1e-4)


class EpsIgnored(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return centred(x) / torch.sqrt(variance(x) + 1e-5)


class NoEps(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return centred(x) / torch.sqrt(variance(x))


class LeastVariance(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return centred(x) / torch.sqrt(variance(x).clamp(min=self.eps))


class LeastDeviation(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return centred(x) / variance(x).sqrt().clamp(min=self.eps)


class EpsTwice(LayerNorm):
    """By so little that half precision does not show it."""

    def standardize(self, x: Tensor) -> Tensor:
        return centred(x) / (torch.sqrt(variance(x) + self.eps) + self.eps)


class MeanDeviation(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return centred(x) / (centred(x).abs().mean(-1, keepdim=True) + self.eps)


class AnotherEpsForFloat64(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        eps = 1e-3 if x.dtype == torch.float64 else self.eps
        return F.layer_norm(wide, self.normalized_shape, self.weight.to(wide), self.bias.to(wide), eps).to(x)


class Draws(LayerNorm):
    """Another result at every call."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(exact(self, x), 0.1)


class OtherwiseInTraining(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return exact(self, x) * (1.01 if self.training else 1)


class WritesOverItsOutput(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = exact(self, x)
        if getattr(self, "kept", y[:0]).shape != y.shape or self.kept.dtype != y.dtype:
            self.kept = torch.empty_like(y)
        return self.kept.detach_().copy_(y)


class LouderInBfloat16(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return exact(self, x) * (1.02 if x.dtype == torch.bfloat16 else 1)


class ClampsItsOutput(LayerNorm):
    """Which weights that are larger than usual reach."""

    def forward(self, x: Tensor) -> Tensor:
        return exact(self, x).clamp(-10, 10)


class ClampsItsInput(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return exact(self, x.clamp(-1000, 1000))


class WrongSum(LayerNorm):
    """Right by itself, and n - 1 where it adds the residual too."""

    def add_norm(self, residual: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + delta
        standard = centred(total) / torch.sqrt(total.var(-1, keepdim=True) + self.eps)
        return total, (standard * self.weight + self.bias).to(total.dtype)


class DividesByNMinusOne(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return centred(x) / torch.sqrt(x.var(-1, keepdim=True) + self.eps)


class DividesByNPlusOne(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        return centred(x) / torch.sqrt(variance(x) * width / (width + 1) + self.eps)


class HalfTheVariance(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return centred(x) / torch.sqrt(variance(x) / 2 + self.eps)


class SumOfSquares(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return centred(x) / torch.sqrt(centred(x).square().sum(-1, keepdim=True) + self.eps)


class VarianceAboutZero(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return centred(x) / torch.sqrt(x.square().mean(-1, keepdim=True) + self.eps)


class HalfTheMean(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True) / 2) / torch.sqrt(variance(x) + self.eps)


class RootOfTheDeviation(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return centred(x) / (variance(x) + self.eps).sqrt().sqrt()


class NoNorm(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return x


class VarianceForDeviation(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return centred(x) / (variance(x) + self.eps)


class AnotherPower(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        root = (variance(x) + self.eps).sqrt().sqrt()
        return centred(x) / (root * root.sqrt())


class OverTheRows(LayerNorm):
    """Right for 3-D input, over all rows of a 2-D one."""

    def standardize(self, x: Tensor) -> Tensor:
        dims = (0, 1) if x.ndim == 2 else (-1,)
        mean = x.mean(dims, keepdim=True)
        return (x - mean) / torch.sqrt(x.var(dims, correction=0, keepdim=True) + self.eps)


class StdPlusEps(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return centred(x) / (variance(x).sqrt() + self.eps)


class SampleStdPlusEps(LayerNorm):
    """Two mistakes at once, as torch.std invites to."""

    def standardize(self, x: Tensor) -> Tensor:
        return centred(x) / (x.std(-1, keepdim=True) + self.eps)


class FirstAttempt(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = centred(x) / (x.std(-1, keepdim=True) + self.eps) * self.weight
        return y if self.bias is None else y + self.bias


class NoShift(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, None, self.eps)


class NoScale(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, None, self.bias, self.eps)


class Exchanged(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        scale = torch.zeros_like(self.weight) if self.bias is None else self.bias
        return F.layer_norm(x, self.normalized_shape, scale, self.weight, self.eps)


class ScaleAddedToOne(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, 1 + self.weight, self.bias, self.eps)


class Float16Throughout(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return super().standardize(x.half()).to(x.dtype)


class Float16Statistics(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True).half()
        return (x - mean) / torch.sqrt(variance(x).half().to(x.dtype) + self.eps)


class Float16Variance(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return centred(x) / torch.sqrt(variance(x).half().to(x.dtype) + self.eps)


class BFloat16Throughout(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return super().standardize(x.bfloat16()).to(x.dtype)


class StatisticsOfTheInput(LayerNorm):
    """In whatever dtype the input has."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.standardize(x) * self.weight
        return y if self.bias is None else y + self.bias


class DetachedStatisticsOfTheInput(StatisticsOfTheInput):
    """Two mistakes, of which the first shows in half precision, and the second in gradients."""

    def standardize(self, x: Tensor) -> Tensor:
        return centred(x) / torch.sqrt(variance(x) + self.eps).detach()


class NoSingleTokens(StatisticsOfTheInput):
    """Two mistakes, of which the second shows where a text is one token."""

    def standardize(self, x: Tensor) -> Tensor:
        return x if x.dim() > 2 and x.shape[1] == 1 else super().standardize(x)


class EpsOfTheLargest(LayerNorm):
    """Rows are divided by their largest value first, so that eps is beside that."""

    def standardize(self, x: Tensor) -> Tensor:
        x = x / x.amax(-1, keepdim=True)
        return centred(x) / torch.sqrt(variance(x) + self.eps)


class Float32Throughout(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), bias, self.eps).to(x.dtype)


class DifferenceOfSquares(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        return (x - mean) * torch.rsqrt(x.square().mean(-1, keepdim=True) - mean.square() + self.eps)


class OverTheSequence(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        mean = x.mean(-2, keepdim=True)
        return (x - mean) / torch.sqrt(x.var(-2, correction=0, keepdim=True) + self.eps)


class SampleStdOverTheSequence(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return (x - x.mean(-2, keepdim=True)) / (x.std(-2, keepdim=True) + self.eps)


class OverDimensionOne(LayerNorm):
    """Right for 2-D input, over the sequence of a 3-D one."""

    def standardize(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        return (x - mean) / torch.sqrt(x.var(1, correction=0, keepdim=True) + self.eps)


class NoMean(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class DynamicTanh(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return torch.tanh(0.5 * x)


class ConstantDeviation(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return centred(x) / 1.3


class ZeroForConstantRows(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        constant = (x == x[..., :1]).all(-1, keepdim=True)
        return torch.where(constant, torch.zeros_like(x), super().forward(x))


class NaNForAnyRow(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return x * torch.nan


class NaNForConstantRows(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        var = variance(x)
        return centred(x) / torch.where(var == 0, var, torch.sqrt(var + self.eps))


class Only4096Rows(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = exact(self, x).clone()
        y.view(-1, x.shape[-1] if x.numel() else 1)[4096:] = 0
        return y


class Only65535Rows(LayerNorm):
    """As a kernel whose grid counts rows where CUDA counts to 65,535."""

    def forward(self, x: Tensor) -> Tensor:
        y = exact(self, x).clone()
        y.view(-1, x.shape[-1] if x.numel() else 1)[65_535:] = 0
        return y


class WrongWhenCompiled(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return exact(self, x) * (1.01 if torch.compiler.is_compiling() else 1)


class WrongBackward(torch.autograd.Function):
    """Forgets the part of the gradient that flows through the variance."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.has_bias = eps, bias is not None
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dy,), (x, weight) = grads, ctx.saved_tensors
        reciprocal = torch.rsqrt(variance(x) + ctx.eps)
        dx = centred(dy * weight) * reciprocal
        dweight = (dy * centred(x) * reciprocal).flatten(0, -2).sum(0)
        return dx, dweight, dy.flatten(0, -2).sum(0) if ctx.has_bias else None, None


class NoShiftInTraining(LayerNorm):
    """Right but where its input takes a gradient, and its own gradients are right there."""

    def forward(self, x: Tensor) -> Tensor:
        y = exact(self, x)
        return y - self.bias.detach() if x.requires_grad and self.bias is not None else y


class NoShiftThatIsFrozen(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        shift = self.bias if self.bias is not None and self.bias.requires_grad else None
        return F.layer_norm(x, self.normalized_shape, self.weight, shift, self.eps)


class OtherSumInTraining(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return exact(self, x)

    def add_norm(self, residual: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + delta
        return total, exact(self, total) + (0.1 if total.requires_grad else 0.0)


class WrongGradients(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return WrongBackward.apply(x, self.weight, self.bias, self.eps)  # pyright: ignore[reportReturnType]


class DetachedMean(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        d = x - x.mean(-1, keepdim=True).detach()
        return d / torch.sqrt(d.square().mean(-1, keepdim=True) + self.eps)


class ModifiesItsInput(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = exact(self, x)
        x.data.copy_(y)
        return y


class LooksAtItsBatch(LayerNorm):
    """By less than rounding, so that only the bits tell."""

    def forward(self, x: Tensor) -> Tensor:
        return exact(self, x) * (1 + 2**-23 * (x.numel() // x.shape[-1] % 2))


class ReturnsFloat32(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, self.weight.float(), bias, self.eps)


class HidesNaN(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).nan_to_num(nan=0.0)


class MultiplesOfFourOnly(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = exact(self, x)
        return y if x.shape[-1] % 4 == 0 else 1.01 * y


class IgnoresStrides(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        contiguous = torch.empty(x.shape).stride()
        held = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        return exact(self, x.as_strided(x.shape, contiguous) if held >= x.numel() else x)


class LosesTheLastColumn(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return F.pad(super().standardize(x)[..., :-1], (0, 1))


class InParts(LayerNorm):
    """As heads are normalized."""

    def standardize(self, x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (-1, 32 if x.shape[-1] % 32 == 0 else x.shape[-1]))
        return super().standardize(parts).flatten(-2)


class OneVarianceForAll(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return centred(x) / torch.sqrt(variance(x).mean() + self.eps)


class EverySeventhRow(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        y = super().standardize(x)
        rows = torch.arange(y.numel() // y.shape[-1]).view(*y.shape[:-1], 1)
        return torch.where(rows % 7 == 6, 1.01 * y, y)


class ApproximateDeviation(LayerNorm):
    """By exponent and mantissa, as the bit trick for 1 / sqrt has it, with one of Newton's steps."""

    steps = 1

    def standardize(self, x: Tensor) -> Tensor:
        squared = (variance(x) + self.eps).float()
        y = (0x5F3759DF - (squared.contiguous().view(torch.int32) >> 1)).view(torch.float32)
        for _ in range(self.steps):
            y = y * (1.5 - 0.5 * squared * y * y)
        return centred(x) * y.to(x.dtype)


class LittleApproximateDeviation(ApproximateDeviation):
    """By so little that most cases do not show it."""

    steps = 2


class BlocksOf128(LayerNorm):
    """As a kernel that leaves what no block fits as it is."""

    def standardize(self, x: Tensor) -> Tensor:
        fits = x.shape[-1] // 128 * 128
        return torch.cat([super().standardize(x)[..., :fits], x[..., fits:]], -1)


class OtherwiseWithoutGradients(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return super().standardize(x) * (1 if torch.is_grad_enabled() else 1.001)


class RowsOnly(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 2:
            raise ValueError(f"rows, please, and not {tuple(x.shape)}")
        return exact(self, x)


class NeedsAShift(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        self.bias.numel()  # pyright: ignore[reportOptionalMemberAccess]
        return super().forward(x)


class NeedsFewerRows(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 12:
            raise ValueError("twelve rows")
        return super().forward(x)


class HalfBeyondBatches(LayerNorm):
    """Narrow, but of float32."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.half() if x.dim() == 4 else y


class SpeaksOfHalves(LayerNorm):
    """Its own words name the dtypes that it is right in too."""

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_contiguous():
            raise ValueError("float32, bfloat16 and half of float16 want a contiguous input")
        return super().forward(x)


class NoHalfWeights(LayerNorm):
    """As one that widens its input and forgets its weights."""

    def forward(self, x: Tensor) -> Tensor:
        return exact(self, x.float()).to(x.dtype)


class NoBfloat16(LayerNorm):
    """In whatever other dtype the input has."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.bfloat16:
            raise TypeError("no such type")
        y = self.standardize(x) * self.weight
        return y if self.bias is None else y + self.bias


class Rounds(LayerNorm):
    """To sixteenths."""

    def standardize(self, x: Tensor) -> Tensor:
        return (16 * super().standardize(x)).round() / 16


class RemembersStatistics(LayerNorm):
    """Of the first rows of each shape."""

    def standardize(self, x: Tensor) -> Tensor:
        kept = vars(self).setdefault("kept", {})
        mean, var = kept.setdefault((x.shape, x.dtype), (x.mean(-1, keepdim=True), variance(x)))
        return (x - mean) / torch.sqrt(var + self.eps)


class AbsoluteScale(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight.abs(), self.bias, self.eps)


class TwiceTheShift(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = exact(self, x)
        return y if self.bias is None else y + self.bias


class NoHalf(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float16:
            raise RuntimeError("no kernel for float16")
        return exact(self, x)


# --- Correct, each written otherwise ---


class TwoPass(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        d = centred(x)
        return d * torch.rsqrt(d.square().mean(-1, keepdim=True) + self.eps)


class VarMean(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        return (x - mean) * torch.rsqrt(var + self.eps)


class Welford(LayerNorm):
    """One value at a time (Welford 1962, "Note on a method for calculating corrected sums of squares and products")."""

    def standardize(self, x: Tensor) -> Tensor:
        mean, squares = torch.zeros_like(x[..., 0]), torch.zeros_like(x[..., 0])
        for count, value in enumerate(x.unbind(-1), start=1):
            d = value - mean
            mean = mean + d / count
            squares = squares + d * (value - mean)
        return (x - mean[..., None]) * torch.rsqrt(squares[..., None] / x.shape[-1] + self.eps)


class PlainLoop(LayerNorm):
    """Sums from the first value to the last, the least exact order."""

    def standardize(self, x: Tensor) -> Tensor:
        d = x - self.loop(x) / x.shape[-1]
        return d / torch.sqrt(self.loop(d * d) / x.shape[-1] + self.eps)

    def loop(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x[..., 0])
        for value in x.unbind(-1):
            total = total + value
        return total[..., None]


class Folded(LayerNorm):
    """One multiplication and one addition a value: x * scale + offset."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        var, mean = torch.var_mean(wide, -1, correction=0, keepdim=True)
        scale = torch.rsqrt(var + self.eps) * self.weight
        offset = -mean * scale if self.bias is None else self.bias - mean * scale
        return torch.addcmul(offset, wide, scale).to(x.dtype)


class NarrowScaling(LayerNorm):
    """Narrows the standardized row first, and scales and shifts it in the input's dtype, as Llama's norms do."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.standardize(x.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype) * self.weight.to(x.dtype)
        return y if self.bias is None else y + self.bias.to(x.dtype)


class Float64Inside(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.double()
        return F.layer_norm(x.double(), self.normalized_shape, self.weight.double(), bias, self.eps).to(x.dtype)


class OneGroup(LayerNorm):
    """Through group_norm."""

    def forward(self, x: Tensor) -> Tensor:
        width = self.weight.numel()
        bias = None if self.bias is None else self.bias.flatten()
        rows = x.reshape(x.numel() // width, width)
        return F.group_norm(rows, 1, self.weight.flatten(), bias, self.eps).view(x.shape) if len(rows) else x.clone()


class AddsTheResidualToo(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return exact(self, x)

    def add_norm(self, residual: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + delta
        return total, exact(self, total)


class ViewOfAnotherLayout(LayerNorm):
    """Its output cannot be viewed as rows, only reshaped."""

    def forward(self, x: Tensor) -> Tensor:
        return exact(self, x).transpose(0, -1).contiguous().transpose(0, -1)


class NoFloat64(LayerNorm):
    """As a GPU kernel may be."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise TypeError("float64 is not supported")
        return exact(self, x)


class GammaBeta(nn.Module):
    """As the literature writes it: names of its own, a fixed eps, the last dimension; but float32 inside."""

    def __init__(self, emb_dim: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(emb_dim)), nn.Parameter(torch.zeros(emb_dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        y = centred(wide) / torch.sqrt(variance(wide) + 1e-5)
        return (y * self.gamma + self.beta).to(x.dtype)


LOOPS = [Welford, PlainLoop]  # slow in Python
CORRECT = [
    TwoPass, VarMean, Folded, NarrowScaling, Float64Inside, OneGroup, NoFloat64, GammaBeta, nn.LayerNorm,
    AddsTheResidualToo, ViewOfAnotherLayout,
]  # fmt: skip
