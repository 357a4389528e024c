"""LayerNorms as other packages compute them: their formulas in a few lines of torch, and how the kit names each.

Sources: jax.nn.standardize and penzai 0.2.5; Haiku 0.0.17; tinygrad 0.14; MindSpore 2.10; MLX 0.32; OpenVINO 2026.4;
Paddle 3.3; x-transformers; timm's SimpleNorm (fast_norm.py); Flax.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from kit import Forward, norm_with
from sabotages import HALF_NAMES, ROUNDED, ROW_ROUNDED, THREE_TIMES, affine, wide
from torch import Tensor, nn

from minigpt import LayerNorm


def mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def wide_row(x: Tensor, eps: float) -> Tensor:
    d = wide(x) - mean(wide(x))
    return d * torch.rsqrt(mean(d.square()) + eps)


def standardize(norm: Any, x: Tensor) -> Tensor:
    """jax.nn.standardize, penzai: a variance in one pass, in the dtype of the input."""
    variance = mean(x.square()) - mean(x).square()
    return affine(norm, (x - mean(x)) * torch.rsqrt(variance + norm.eps)).to(x.dtype)


def haiku(norm: Any, x: Tensor) -> Tensor:
    """Mean and variance are rounded, and so is each step after them."""
    variance = x.var(-1, correction=0, keepdim=True)
    inverse = norm.weight * torch.rsqrt(variance + norm.eps)
    y = inverse * (x - mean(x))
    return (y if norm.bias is None else y + norm.bias).to(x.dtype)


def tinygrad(norm: Any, x: Tensor) -> Tensor:
    d = x - mean(x)
    return affine(norm, d * (mean(d.square()) + norm.eps).rsqrt()).to(x.dtype)


def mindspore(norm: Any, x: Tensor) -> Tensor:
    """The mean is rounded to the dtype of the weight."""
    d = wide(x) - wide(mean(wide(x)).to(norm.weight.dtype))
    return affine(norm, d * (mean(d.square()) + norm.eps).rsqrt()).to(x.dtype)


def mlx(norm: Any, x: Tensor) -> Tensor:
    """Three roundings in half precision."""
    return affine(norm, wide_row(x, norm.eps).to(x.dtype)).to(x.dtype)


def openvino(norm: Any, x: Tensor) -> Tensor:
    """Two roundings in half precision: the scaled row, and its sum with the shift."""
    scaled = (wide_row(x, norm.eps) * norm.weight).to(x.dtype)
    return (scaled if norm.bias is None else scaled + norm.bias).to(x.dtype)


def flax(norm: Any, x: Tensor) -> Tensor:
    """The result has the wider dtype of rows and weights."""
    return affine(norm, wide_row(x, norm.eps)).to(torch.promote_types(x.dtype, norm.weight.dtype))


def simple_norm(norm: Any, x: Tensor) -> Tensor:
    """timm's: the row itself, over the deviation about the mean."""
    variance = wide(x).var(-1, keepdim=True)
    return affine(norm, wide(x) * torch.rsqrt(variance + norm.eps)).to(x.dtype)


class GammaOnly(nn.Module):
    """x-transformers': a row that is rounded, times a scale, and no shift."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return (F.layer_norm(x, x.shape[-1:]) * self.gamma).to(x.dtype)


def norm_of(forward: Forward) -> type[LayerNorm]:
    return norm_with(forward, name=forward.__name__)


TOO_FEW = "it computes in too few bits for {} input: "
PRODUCT = "it rounds row * scale to {} before the shift is added, and again after"
FORMULAS: dict[Any, tuple[str, ...]] = {  # and how each of the diagnoses begins
    norm_of(standardize): (
        "wrong only for mean far from 0, where a difference of squares",
        *(TOO_FEW.format(name) + "the variance is E[x^2] - E[x]^2" for name in HALF_NAMES),
    ),
    norm_of(haiku): (*ROUNDED,),
    norm_of(tinygrad): (*ROUNDED,),
    norm_of(mindspore): (*(TOO_FEW.format(name) + "the mean is rounded to" for name in HALF_NAMES),),
    norm_of(mlx): (*THREE_TIMES,),
    norm_of(openvino): (*map(PRODUCT.format, HALF_NAMES),),
    norm_of(flax): ("flax changes the dtype: bfloat16 rows with a float32 scale and shift come out in float32",),
    norm_of(simple_norm): (
        "the mean subtracted in the variance and not from the row (neither",
        "the variance divided by n - 1",
    ),
    GammaOnly: (*ROW_ROUNDED,),
}

# --- Orders of sums ---


class InOrder(torch.autograd.Function):
    """The sum of each row, added by ``add`` in float32 or wider, with the gradient of a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, add: Callable[[np.ndarray], np.ndarray]) -> Tensor:
        ctx.width = x.shape[-1]
        return torch.from_numpy(np.ascontiguousarray(add(x.detach().numpy()))).to(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return dy.expand(*dy.shape[:-1], ctx.width), None


def serially(x: np.ndarray) -> np.ndarray:
    """MLX, tinygrad, TVM: one value after the other."""
    return np.add.accumulate(x, axis=-1)[..., -1:]


def in_pairs(x: np.ndarray) -> np.ndarray:
    while x.shape[-1] > 1:
        x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, x.shape[-1] % 2)])
        x = x[..., ::2] + x[..., 1::2]
    return x


def in_lanes(lanes: int) -> Callable[[np.ndarray], np.ndarray]:
    """Each lane adds every 8th, 16th or 32nd value, then the lanes are added in pairs."""

    def add(x: np.ndarray) -> np.ndarray:
        x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % lanes)])
        return in_pairs(np.add.accumulate(x.reshape(*x.shape[:-1], x.shape[-1] // lanes, lanes), axis=-2)[..., -1, :])

    add.__name__ = f"lanes of {lanes}"
    return add


def in_blocks(x: np.ndarray) -> np.ndarray:
    """Blocks of 128 by themselves, then one after the other."""
    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 128)])
    return serially(serially(x.reshape(*x.shape[:-1], x.shape[-1] // 128, 128))[..., 0])


def kahan(x: np.ndarray) -> np.ndarray:
    """Kahan 1965: what a sum loses is carried on."""
    total, lost = np.zeros_like(x[..., 0]), np.zeros_like(x[..., 0])
    for value in np.moveaxis(x, -1, 0):
        step = value - lost
        after = total + step
        lost = (after - total) - step
        total = after
    return total[..., None]


def summing(add: Callable[[np.ndarray], np.ndarray]) -> type[LayerNorm]:
    """A LayerNorm whose rows are added in an order."""

    def row(norm: Any, x: Tensor) -> Tensor:
        d = x - InOrder.apply(x, add) / x.shape[-1]
        return d / torch.sqrt(InOrder.apply(d * d, add) / x.shape[-1] + norm.eps)

    return type(add.__name__, (LayerNorm,), {"standardize": row})


SERIAL = summing(serially)
ORDERS = [summing(add) for add in (in_pairs, in_blocks, kahan, *map(in_lanes, (8, 16, 32)))]
