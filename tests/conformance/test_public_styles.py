"""No false alarm: LayerNorms as public code writes them pass at every dtype, with every seed.

A class that computes otherwise at a dtype, on purpose or not, is named for it there and passes at the others.
"""

import functools
from typing import Any

import pytest
import sabotages
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.convnext.modeling_convnext import ConvNextLayerNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm

from minigpt.conformance import check_norm

SEEDS = 10
RANDOM = ["widths", "sizes", "values", "layouts", "behaviour", "gradients"]  # all but torch.compile
wide = sabotages.wide


class Style(nn.Module):
    """Scale and shift under the names that most code has."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim)), eps

    def affine(self, row: Tensor, like: Tensor) -> Tensor:
        """Scale and shift in the precision of the row, then round once."""
        return (row * self.weight + self.bias).to(like.dtype)


class NanoGPT(nn.Module):
    def __init__(self, ndim: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class GammaAndABuffer(nn.Module):
    """A scale that is trained, and a shift that is not."""

    beta: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))
        self.register_buffer("beta", torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.gamma, self.beta)


class Bert(nn.Module):
    """The mean and the variance by name, as in the first BERT in PyTorch; in float32."""

    def __init__(self, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(hidden_size)), nn.Parameter(torch.zeros(hidden_size))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        u = wide(x).mean(-1, keepdim=True)
        s = (wide(x) - u).pow(2).mean(-1, keepdim=True)
        return (self.gamma * ((wide(x) - u) / torch.sqrt(s + self.variance_epsilon)) + self.beta).to(x.dtype)


class WideInside(nn.LayerNorm):
    """Input and weights in float32, the result in the input's dtype: Whisper's, CLIP's, fairseq's."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = (None if one is None else wide(one) for one in (self.weight, self.bias))
        return F.layer_norm(wide(input), self.normalized_shape, weight, bias, self.eps).to(input.dtype)


class VarMean(Style):
    def forward(self, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(wide(x), -1, correction=0, keepdim=True)
        return self.affine((wide(x) - mean) * torch.rsqrt(var + self.eps), x)


class StdSquared(Style):
    def forward(self, x: Tensor) -> Tensor:
        std, mean = torch.std_mean(wide(x), -1, correction=0, keepdim=True)
        return self.affine((wide(x) - mean) / torch.sqrt(std**2 + self.eps), x)


class Haiku(Style):
    """The reciprocal times the scale first."""

    def forward(self, x: Tensor) -> Tensor:
        y = wide(x) - wide(x).mean(-1, keepdim=True)
        inverse = self.weight * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (inverse * y + self.bias).to(x.dtype)


class Power(Style):
    """A root as a power, and sums divided by n."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[-1]
        shifted = wide(x) - wide(x).sum(-1, keepdim=True) / n
        return self.affine(shifted * ((shifted**2).sum(-1, keepdim=True) / n + self.eps) ** -0.5, x)


class VectorNorm(Style):
    def forward(self, x: Tensor) -> Tensor:
        d = wide(x) - wide(x).mean(-1, keepdim=True)
        length = torch.linalg.vector_norm(d, dim=-1, keepdim=True)
        return self.affine(d / torch.sqrt(length.square() / x.shape[-1] + self.eps), x)


class Native(Style):
    """The operator below layer_norm, which returns the statistics too."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)[0]


class InstanceNorm(Style):
    """One channel a row."""

    def forward(self, x: Tensor) -> Tensor:
        rows = wide(x).reshape(1, -1, x.shape[-1])
        return self.affine(F.instance_norm(rows, eps=self.eps).view(x.shape), x) if x.numel() else x.clone()


class BatchNorm(Style):
    """Batch statistics with rows as channels."""

    def forward(self, x: Tensor) -> Tensor:
        rows = wide(x).reshape(1, -1, x.shape[-1])
        row = F.batch_norm(rows, None, None, training=True, eps=self.eps) if x.numel() else rows
        return self.affine(row.view(x.shape), x)


class Transposed(Style):
    """Rows as columns."""

    def forward(self, x: Tensor) -> Tensor:
        columns = wide(x).reshape(-1, x.shape[-1]).t()
        d = columns - columns.mean(0)
        return self.affine((d / (d.square().mean(0) + self.eps).sqrt()).t().reshape(x.shape), x)


class TwiceCentred(Style):
    """The mean of what is left is taken off too."""

    def forward(self, x: Tensor) -> Tensor:
        d = wide(x) - wide(x).mean(-1, keepdim=True)
        d = d - d.mean(-1, keepdim=True)
        return self.affine(d * (d.square().mean(-1, keepdim=True) + self.eps).rsqrt(), x)


class Float64(Style):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.double(), x.shape[-1:], self.weight.double(), self.bias.double(), self.eps).to(x.dtype)


class InPieces(Style):
    """64 rows at a time."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).split(64)
        pieces = [F.layer_norm(one, x.shape[-1:], self.weight, self.bias, self.eps) for one in rows]
        return torch.cat(pieces).view(x.shape)


class Written(torch.autograd.Function):
    """Both passes by hand, as a chapter on backpropagation writes them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        row = wide(x) - wide(x).mean(-1, keepdim=True)
        rstd = (row.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(row * rstd, rstd, weight)
        return (row * rstd * weight + bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        s, rstd, weight = ctx.saved_tensors
        dy, dtype = wide(dy), dy.dtype
        g = dy * weight
        dx = (g - g.mean(-1, keepdim=True) - s * (g * s).mean(-1, keepdim=True)) * rstd
        rows = tuple(range(dy.ndim - 1))
        return dx.to(dtype), (dy * s).sum(rows).to(weight.dtype), dy.sum(rows).to(weight.dtype), None


class ByHand(Style):
    def forward(self, x: Tensor) -> Tensor:
        return Written.apply(x, self.weight, self.bias, self.eps)  # type: ignore[return-value]


@torch.jit.script_if_tracing
def scripted(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


class Scripted(Style):
    def forward(self, x: Tensor) -> Tensor:
        return scripted(x, self.weight, self.bias, self.eps)


class Sequence(nn.Module):
    """A norm without scale and shift, and a layer that has them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner, self.affine = nn.LayerNorm(dim, elementwise_affine=False), Style(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.affine.affine(self.inner(wide(x)), x)


class WithResidual(Style):
    """A residual that may be left out: flash-attn's and Liger's signature."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        x = x if residual is None else x + residual
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


class AffineDropout(Style):
    """Dropout of the scale, off by default."""

    def __init__(self, dim: int, eps: float = 1e-5, dropout: float = 0.0) -> None:
        super().__init__(dim, eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.dropout(self.weight), self.dropout(self.bias), self.eps)


class Checked(Style):
    """Raises for another width, and takes a list as its shape."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.weight.shape[0]:
            raise ValueError("another width")
        return F.layer_norm(x, [x.shape[-1]], self.weight, self.bias, self.eps)


class OnePlus(Style):
    """The scale is 1 + weight, which starts at 0: Megatron's 1p, Gemma's."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__(dim, eps)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight + 1, self.bias, self.eps)


class Einsum(Style):
    """Means by einsum, that is by a product of matrices."""

    def forward(self, x: Tensor) -> Tensor:
        ones = wide(x).new_full((x.shape[-1],), 1 / x.shape[-1])
        d = wide(x) - torch.einsum("...c,c->...", wide(x), ones)[..., None]
        return self.affine(d * (torch.einsum("...c,...c,c->...", d, d, ones)[..., None] + self.eps).rsqrt(), x)


class InTheDtype(Style):
    """Statistics in the dtype of the input: ESM's, and most tutorials'."""

    def forward(self, x: Tensor) -> Tensor:
        d = x - x.mean(-1, keepdim=True)
        return self.weight * d / torch.sqrt(d.pow(2).mean(-1, keepdim=True) + self.eps) + self.bias


class FastVariance(Style):
    """Flax's and TensorFlow's fast variance, a difference of squares."""

    def forward(self, x: Tensor) -> Tensor:
        mean = wide(x).mean(-1, keepdim=True)
        var = (wide(x).square().mean(-1, keepdim=True) - mean.square()).clamp(min=0)
        return self.affine((wide(x) - mean) * torch.rsqrt(var + self.eps), x)


RIGHT: list[Any] = [
    "fused", "textbook", functools.partial(nn.LayerNorm, eps=1e-5), ConvNextLayerNorm,
    NemotronLayerNorm1P, NanoGPT, GammaAndABuffer, Bert, WideInside, VarMean, StdSquared, Haiku, Power, VectorNorm,
    Native, InstanceNorm, BatchNorm, Transposed, TwiceCentred, Float64, ByHand, Scripted, Sequence,
    WithResidual, AffineDropout, Checked, OnePlus, InPieces, *sabotages.CORRECT,
]  # fmt: skip
# The dtypes at which a class is not a LayerNorm, and the first words of the diagnosis
OTHERWISE: dict[Any, tuple[set[str], str]] = {
    CohereLayerNorm: ({"float64"}, "it computes in float32 for float64 input"),
    OlmoLayerNorm: ({"float64"}, "it computes in float32 for float64 input"),
    Einsum: ({"float32", "bfloat16"}, "a row depends on its batch"),
    InTheDtype: ({"bfloat16", "float16"}, "statistics are kept in bfloat16"),
    FastVariance: ({"float32", "float64", "bfloat16", "float16"}, "wrong only for mean far from 0, where a difference"),
}

unchecked = pytest.mark.usefixtures("unchecked")


def name_of(norm: Any) -> str:
    return getattr(norm, "__name__", str(norm)[:20])


@unchecked
@pytest.mark.thorough
@pytest.mark.parametrize("norm", RIGHT, ids=name_of)
def test_a_right_norm_passes_with_every_seed(norm: Any) -> None:
    for seed in range(SEEDS):
        report = check_norm(norm, device="cpu", cases=RANDOM, seed=seed)
        assert report.passed, (seed, str(report))


@unchecked
@pytest.mark.thorough
@pytest.mark.parametrize(("norm", "told"), OTHERWISE.items(), ids=map(name_of, OTHERWISE))
def test_what_computes_otherwise_is_told_so_and_where(norm: Any, told: tuple[set[str], str]) -> None:
    dtypes, diagnosis = told
    for seed in range(SEEDS):
        report = check_norm(norm, device="cpu", cases=RANDOM, seed=seed)
        assert {dtype for dtype, passed in report.dtypes.items() if not passed} == dtypes, (seed, str(report))
        assert report.diagnoses[0].startswith(diagnosis), (seed, report.diagnoses)
