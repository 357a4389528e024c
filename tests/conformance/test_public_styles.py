"""No false alarm: LayerNorms and RMSNorms as public code writes them pass at every dtype, with every seed.

A class that computes otherwise at a dtype, on purpose or not, is named for it there and passes at the others.
"""

import functools
from typing import Any

import pytest
import sabotages
import torch
import torch.nn.functional as F
from sabotages import NanoGPT, centred, wide
from torch import Tensor, nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.convnext.modeling_convnext import ConvNextLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from minigpt.conformance import check_norm

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("unchecked")]

SEEDS = 10
RANDOM = ["widths", "sizes", "values", "layouts", "behaviour", "gradients"]  # all but torch.compile


class Style(nn.Module):
    """Scale and shift under the names that most code has."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim)), eps

    def affine(self, row: Tensor, like: Tensor) -> Tensor:
        """Scale and shift in the precision of the row, then round once."""
        return (row * self.weight + self.bias).to(like.dtype)


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


def var_mean(n: Style, x: Tensor) -> Tensor:
    var, mean = torch.var_mean(wide(x), -1, correction=0, keepdim=True)
    return n.affine((wide(x) - mean) * torch.rsqrt(var + n.eps), x)


def std_squared(n: Style, x: Tensor) -> Tensor:
    std, mean = torch.std_mean(wide(x), -1, correction=0, keepdim=True)
    return n.affine((wide(x) - mean) / torch.sqrt(std**2 + n.eps), x)


def haiku(n: Style, x: Tensor) -> Tensor:
    """The reciprocal times the scale first."""
    y = centred(wide(x))
    inverse = n.weight * torch.rsqrt(y.square().mean(-1, keepdim=True) + n.eps)
    return (inverse * y + n.bias).to(x.dtype)


def power(n: Style, x: Tensor) -> Tensor:
    """A root as a power, and sums divided by n."""
    shifted = wide(x) - wide(x).sum(-1, keepdim=True) / x.shape[-1]
    return n.affine(shifted * ((shifted**2).sum(-1, keepdim=True) / x.shape[-1] + n.eps) ** -0.5, x)


def vector_norm(n: Style, x: Tensor) -> Tensor:
    d = centred(wide(x))
    length = torch.linalg.vector_norm(d, dim=-1, keepdim=True)
    return n.affine(d / torch.sqrt(length.square() / x.shape[-1] + n.eps), x)


def native(n: Style, x: Tensor) -> Tensor:
    """The operator below layer_norm, which returns the statistics too."""
    return torch.native_layer_norm(x, x.shape[-1:], n.weight, n.bias, n.eps)[0]


def instance_norm(n: Style, x: Tensor) -> Tensor:
    """One channel a row."""
    rows = wide(x).reshape(1, -1, x.shape[-1])
    return n.affine(F.instance_norm(rows, eps=n.eps).view(x.shape), x) if x.numel() else x.clone()


def batch_norm(n: Style, x: Tensor) -> Tensor:
    """Batch statistics with rows as channels."""
    rows = wide(x).reshape(1, -1, x.shape[-1])
    row = F.batch_norm(rows, None, None, training=True, eps=n.eps) if x.numel() else rows
    return n.affine(row.view(x.shape), x)


def transposed(n: Style, x: Tensor) -> Tensor:
    """Rows as columns."""
    columns = wide(x).reshape(-1, x.shape[-1]).t()
    d = columns - columns.mean(0)
    return n.affine((d / (d.square().mean(0) + n.eps).sqrt()).t().reshape(x.shape), x)


def twice_centred(n: Style, x: Tensor) -> Tensor:
    """The mean of what is left is taken off too."""
    d = centred(centred(wide(x)))
    return n.affine(d * (d.square().mean(-1, keepdim=True) + n.eps).rsqrt(), x)


def in_pieces(n: Style, x: Tensor) -> Tensor:
    """64 rows at a time."""
    rows = x.reshape(-1, x.shape[-1]).split(64)
    return torch.cat([F.layer_norm(one, x.shape[-1:], n.weight, n.bias, n.eps) for one in rows]).view(x.shape)


@torch.jit.script_if_tracing
def scripted(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def in_a_script(n: Style, x: Tensor) -> Tensor:
    return scripted(x, n.weight, n.bias, n.eps)


def with_residual(n: Style, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """A residual that may be left out: flash-attn's and Liger's signature."""
    x = x if residual is None else x + residual
    return F.layer_norm(x, x.shape[-1:], n.weight, n.bias, n.eps)


def checked(n: Style, x: Tensor) -> Tensor:
    """Raises for another width, and takes a list as its shape."""
    if x.shape[-1] != n.weight.shape[0]:
        raise ValueError("another width")
    return F.layer_norm(x, [x.shape[-1]], n.weight, n.bias, n.eps)


def einsum(n: Style, x: Tensor) -> Tensor:
    """Means by einsum, that is by a product of matrices."""
    ones = wide(x).new_full((x.shape[-1],), 1 / x.shape[-1])
    d = wide(x) - torch.einsum("...c,c->...", wide(x), ones)[..., None]
    return n.affine(d * (torch.einsum("...c,...c,c->...", d, d, ones)[..., None] + n.eps).rsqrt(), x)


def in_the_dtype(n: Style, x: Tensor) -> Tensor:
    """Statistics in the dtype of the input: ESM's, and most tutorials'."""
    d = centred(x)
    return n.weight * d / torch.sqrt(d.pow(2).mean(-1, keepdim=True) + n.eps) + n.bias


def fast_variance(n: Style, x: Tensor) -> Tensor:
    """Flax's and TensorFlow's fast variance, a difference of squares."""
    mean = wide(x).mean(-1, keepdim=True)
    var = (wide(x).square().mean(-1, keepdim=True) - mean.square()).clamp(min=0)
    return n.affine((wide(x) - mean) * torch.rsqrt(var + n.eps), x)


def style(forward: Any) -> type[Style]:
    return type(forward.__name__, (Style,), {"forward": forward})


class Sequence(nn.Module):
    """A norm without scale and shift, and a layer that has them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner, self.affine = nn.LayerNorm(dim, elementwise_affine=False), Style(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.affine.affine(self.inner(wide(x)), x)


class AffineDropout(Style):
    """Dropout of the scale, off by default."""

    def __init__(self, dim: int, eps: float = 1e-5, dropout: float = 0.0) -> None:
        super().__init__(dim, eps)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.dropout(self.weight), self.dropout(self.bias), self.eps)


class OnePlusOfZero(Style):
    """The scale is 1 + weight, which starts at 0: Megatron's 1p, Gemma's."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__(dim, eps)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight + 1, self.bias, self.eps)


FORWARDS = [
    var_mean, std_squared, haiku, power, vector_norm, native, instance_norm, batch_norm, transposed, twice_centred,
    in_pieces, in_a_script, with_residual, checked,
]  # fmt: skip
RIGHT: list[Any] = [
    "fused", "textbook", functools.partial(nn.LayerNorm, eps=1e-5), ConvNextLayerNorm, NemotronLayerNorm1P, NanoGPT,
    GammaAndABuffer, Bert, WideInside, Sequence, AffineDropout, OnePlusOfZero, *map(style, FORWARDS),
    *sabotages.CORRECT,
]  # fmt: skip
RIGHT_BUT_AT_FLOAT64 = [CohereLayerNorm, OlmoLayerNorm]


class RMSStyle(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def mean_square(self, x: Tensor) -> Tensor:
        return wide(x).square().mean(-1, keepdim=True) + self.eps


RMS_FORWARDS: dict[str, Any] = {
    "row_first": lambda n, x: (wide(x) * torch.rsqrt(n.mean_square(x))).to(x.dtype) * n.weight,
    "scale_first": lambda n, x: (wide(x) * (torch.rsqrt(n.mean_square(x)) * n.weight)).to(x.dtype),
    "by_power": lambda n, x: (n.weight * wide(x) * n.mean_square(x) ** -0.5).to(x.dtype),
    "by_length": lambda n, x: (
        wide(x) / torch.sqrt(wide(x).norm(dim=-1, keepdim=True).square() / x.shape[-1] + n.eps) * n.weight
    ).to(x.dtype),
    "in_float64": lambda n, x: F.rms_norm(x.double(), x.shape[-1:], n.weight.double(), n.eps).to(x.dtype),
}
RIGHT_RMS: list[Any] = [
    "rms", nn.RMSNorm, LlamaRMSNorm, GemmaRMSNorm, Gemma3nRMSNorm, Olmo2RMSNorm, T5LayerNorm, GptOssRMSNorm,
    Qwen3RMSNorm,
    *(type(name, (RMSStyle,), {"forward": forward}) for name, forward in RMS_FORWARDS.items()),
]  # fmt: skip
# The dtypes at which a class is not a LayerNorm, and the first words of the diagnosis
OTHERWISE: dict[Any, tuple[set[str], str]] = {
    CohereLayerNorm: ({"float64"}, "it computes in too few bits for float64 input"),
    OlmoLayerNorm: ({"float64"}, "it computes in too few bits for float64 input"),
    style(einsum): ({"float32", "bfloat16"}, "a row depends on its batch"),
    style(in_the_dtype): ({"bfloat16", "float16"}, "it computes in too few bits for bfloat16"),
    style(fast_variance): (
        {"float32", "float64", "bfloat16", "float16"},
        "wrong only for mean far from 0, where a difference",
    ),
}
# Products of matrices in float32 differ in the last bits by processor. On some, those change a row rounded to float16.
AS_ITS_PRODUCTS: dict[str, set[str]] = {"einsum": {"float16"}}


def name_of(norm: Any) -> str:
    return getattr(norm, "__name__", str(norm)[:20])


@pytest.mark.parametrize("norm", RIGHT, ids=name_of)
def test_a_right_norm_passes_with_every_seed(norm: Any) -> None:
    for seed in range(SEEDS):
        report = check_norm(norm, device="cpu", cases=RANDOM, seed=seed)
        assert report.passed, (seed, str(report))


@pytest.mark.parametrize("norm", RIGHT_RMS, ids=name_of)
def test_a_right_rms_norm_passes_with_every_seed(norm: Any) -> None:
    """Those of transformers compute in float32 in a float64 model too."""
    for seed in range(SEEDS):
        report = check_norm(norm, kind="rms_norm", device="cpu", cases=RANDOM, seed=seed)
        assert not {dtype for dtype, passed in report.dtypes.items() if not passed} - {"float64"}, (seed, str(report))


@pytest.mark.parametrize(("norm", "expected"), OTHERWISE.items(), ids=map(name_of, OTHERWISE))
def test_what_computes_otherwise_is_named_and_at_its_dtypes(norm: Any, expected: tuple[set[str], str]) -> None:
    dtypes, diagnosis = expected
    may_differ = AS_ITS_PRODUCTS.get(name_of(norm), set())
    for seed in range(SEEDS):
        report = check_norm(norm, device="cpu", cases=RANDOM, seed=seed)
        failed = {dtype for dtype, passed in report.dtypes.items() if not passed}
        assert failed - may_differ == dtypes, (seed, str(report))
        assert report.diagnoses[0].startswith(diagnosis), (seed, report.diagnoses)
