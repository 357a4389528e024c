"""LayerNorms with one mistake each, and correct ones that are written in other ways than ours."""

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


class EpsIgnored(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return centred(x) / torch.sqrt(variance(x) + 1e-5)


class NoEps(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return centred(x) / torch.sqrt(variance(x))


class EpsTwice(LayerNorm):
    """A mistake so small that half precision does not show it."""

    def standardize(self, x: Tensor) -> Tensor:
        return centred(x) / (torch.sqrt(variance(x) + self.eps) + self.eps)


class Draws(LayerNorm):
    """Returns another result at every call."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(exact(self, x), 0.1)


class WritesOverItsOutput(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = exact(self, x)
        if getattr(self, "kept", y[:0]).shape != y.shape or self.kept.dtype != y.dtype:
            self.kept = torch.empty_like(y)
        return self.kept.detach_().copy_(y)


class LouderInBfloat16(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return exact(self, x) * (1.02 if x.dtype == torch.bfloat16 else 1)


class WrongSum(LayerNorm):
    """Is right alone, and divides by n - 1 in add_norm."""

    def add_norm(self, residual: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + delta
        standard = centred(total) / torch.sqrt(total.var(-1, keepdim=True) + self.eps)
        return total, (standard * self.weight + self.bias).to(total.dtype)


class DividesByNMinusOne(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return centred(x) / torch.sqrt(x.var(-1, keepdim=True) + self.eps)


class HalfTheMean(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True) / 2) / torch.sqrt(variance(x) + self.eps)


class VarianceForDeviation(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return centred(x) / (variance(x) + self.eps)


class StdPlusEps(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return centred(x) / (variance(x).sqrt() + self.eps)


class FirstAttempt(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = centred(x) / (x.std(-1, keepdim=True) + self.eps) * self.weight
        return y if self.bias is None else y + self.bias


class NoShift(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, None, self.eps)


class Exchanged(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        scale = torch.zeros_like(self.weight) if self.bias is None else self.bias
        return F.layer_norm(x, self.normalized_shape, scale, self.weight, self.eps)


class ScaleAddedToOne(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, 1 + self.weight, self.bias, self.eps)


class BFloat16Throughout(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return super().standardize(x.bfloat16()).to(x.dtype)


class RoundedToBFloat16(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).bfloat16().to(x.dtype)


class StatisticsOfTheInput(LayerNorm):
    """Computes in the dtype of the input."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.standardize(x) * self.weight
        return y if self.bias is None else y + self.bias


class DetachedStatisticsOfTheInput(StatisticsOfTheInput):
    """Two mistakes: one shows in half precision, the other in gradients."""

    def standardize(self, x: Tensor) -> Tensor:
        return centred(x) / torch.sqrt(variance(x) + self.eps).detach()


class NoSingleTokens(StatisticsOfTheInput):
    """Two mistakes: one shows in half precision, the other in a text of one token."""

    def standardize(self, x: Tensor) -> Tensor:
        return x if x.dim() > 2 and x.shape[1] == 1 else super().standardize(x)


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


class Only65535Rows(LayerNorm):
    """Like a kernel with one block a row in a grid dimension that CUDA limits to 65,535."""

    def forward(self, x: Tensor) -> Tensor:
        y = exact(self, x).clone()
        y.view(-1, x.shape[-1] if x.numel() else 1)[65_535:] = 0
        return y


class WrongWhenCompiled(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return exact(self, x) * (1.01 if torch.compiler.is_compiling() else 1)


class OtherSumInTraining(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return exact(self, x)

    def add_norm(self, residual: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + delta
        return total, exact(self, total) + (0.1 if total.requires_grad else 0.0)


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
    """Depends on its batch by less than rounding, so that only the bits show it."""

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


class OneVarianceForAll(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        return centred(x) / torch.sqrt(variance(x).mean() + self.eps)


class RowsOnly(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 2:
            raise ValueError(f"rows, please, and not {tuple(x.shape)}")
        return exact(self, x)


class NeedsAShift(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        self.bias.numel()  # pyright: ignore[reportOptionalMemberAccess]
        return super().forward(x)


class NoHalfWeights(LayerNorm):
    """Widens its input, but not its weights."""

    def forward(self, x: Tensor) -> Tensor:
        return exact(self, x.float()).to(x.dtype)


class TwiceTheShift(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = exact(self, x)
        return y if self.bias is None else y + self.bias


class WrongInTraining(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return exact(self, x) * (1.002 if self.training else 1)


class WrongForInference(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return exact(self, x) * (1.002 if torch.is_inference_mode_enabled() else 1)


class WrongInDecoding(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return exact(self, x) * (1.01 if x.ndim == 3 and x.shape[1] == 1 < len(x) else 1)


class WrongGradientsOfTokens(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return exact(self, torch.cat([x[:1], x[1:].detach()]) if x.ndim == 3 else x)


class KeepsItsWeights(LayerNorm):
    """Packs them at its first inference."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return exact(self, x)
        if not hasattr(self, "packed"):
            self.packed = self.weight.clone(), None if self.bias is None else self.bias.clone()
        return F.layer_norm(x, self.normalized_shape, *self.packed, self.eps)


class NoHalf(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float16:
            raise RuntimeError("no kernel for float16")
        return exact(self, x)


# --- Correct norms, written in other ways ---


class TwoPass(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        d = centred(x)
        return d * torch.rsqrt(d.square().mean(-1, keepdim=True) + self.eps)


class VarMean(LayerNorm):
    def standardize(self, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        return (x - mean) * torch.rsqrt(var + self.eps)


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
    """Calls group_norm with one group."""

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
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        y = centred(wide) / torch.sqrt(variance(wide) + 1e-5)
        return (y * self.gamma + self.beta).to(x.dtype)


LOOPS = [Welford, PlainLoop]  # slow in Python
CORRECT = [
    TwoPass, VarMean, Folded, NarrowScaling, Float64Inside, OneGroup, NoFloat64, GammaBeta, nn.LayerNorm,
    AddsTheResidualToo, ViewOfAnotherLayout,
]  # fmt: skip
