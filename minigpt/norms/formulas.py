"""The formula of a norm and its mistakes, once for the conformance kit and for the judge.

A formula has one part of each table. In each table the key "" is the right part, and the other keys name a mistake as a
noun phrase, which completes "It is this model with ...".

B batch, T tokens, C embedding.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from minigpt.norms.record import NormSite
from minigpt.offload import is_offloaded, plain_copy, values_of
from minigpt.precision import Float64

GPT2_EPS = 1e-5
NormParts = Mapping[str, Any]  # of a formula, by the names of the tables

OVER = "statistics over {} in place of the width"
OVER_SEQUENCE = OVER.format("the sequence")
AS_ONE_PLUS, AS_WEIGHT = "the scale as 1 + weight", "the scale as weight, not 1 + weight"
OF_SHIFT = NO_SHIFT, NEITHER, EARLY_SHIFT = (  # a norm without a shift cannot have them
    "no shift", "no scale and no shift", "the shift added before the scale multiplies"
)  # fmt: skip
IS_NEITHER = "(neither a LayerNorm nor an RMSNorm)"
DIMENSIONS = {  # of an input (B, T, C) that the statistics are over
    "": (2,),
    OVER_SEQUENCE: (1,),
}
MEANS = {  # how often the mean is subtracted from the row, and from the values whose squares are the variance
    "layer_norm": {
        "": (1, 1),
        "no mean subtracted (an RMSNorm)": (0, 0),
    },
    "rms_norm": {
        "": (0, 0),
        "the mean subtracted (a LayerNorm)": (1, 1),
    },
}
SPREADS: dict[str, Callable[[Tensor, tuple[int, ...], int], Tensor]] = {  # of n centred values
    "": lambda centred, dims, n: centred.square().mean(dims, keepdim=True),
    "the variance divided by n - 1": lambda centred, dims, n: centred.square().sum(dims, keepdim=True) / (n - 1),
    "the sum of squares in place of their mean": lambda centred, dims, n: centred.square().sum(dims, keepdim=True),
}
DIVISORS: dict[str, Callable[[Tensor, float], Tensor | float]] = {
    "": lambda variance, eps: torch.sqrt(variance + eps),
    "std + eps in place of sqrt(variance + eps)": lambda variance, eps: torch.sqrt(variance) + eps,
    "the variance in place of the deviation: a square root is missing": lambda variance, eps: variance + eps,
    "no division by the deviation": lambda variance, eps: 1.0,
    "sqrt(std + eps) in place of sqrt(variance + eps)": lambda variance, eps: torch.sqrt(torch.sqrt(variance) + eps),
    "(variance + eps)^2 in place of sqrt(variance + eps)": lambda variance, eps: (variance + eps).square(),
}
CURES = {  # what to write, where that is one plain phrase
    "the variance divided by n - 1": "Write var(x, correction=0) in place of var(x, correction=1).",
    "std + eps in place of sqrt(variance + eps)": "Write sqrt(var + eps) in place of sqrt(var) + eps.",
    AS_ONE_PLUS: "Write x * weight in place of x * (1 + weight).",
    AS_WEIGHT: "Write x * (1 + weight) in place of x * weight.",
}
COMMON_EPS, RARE_EPS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-8, 1e-12), (5e-6, 1e-7)
AFFINES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "": lambda y, scale, shift: y * scale + shift,
    NO_SHIFT: lambda y, scale, shift: y * scale,
    "no scale": lambda y, scale, shift: y + shift,
    NEITHER: lambda y, scale, shift: y,
    EARLY_SHIFT: lambda y, scale, shift: (y + shift) * scale,
    AS_ONE_PLUS: lambda y, scale, shift: y * (1 + scale) + shift,
    AS_WEIGHT: lambda y, scale, shift: y * (scale - 1) + shift,
}
RARE: dict[str, dict[str, Any]] = {  # mistakes that are looked for in a norm by itself, and not in a whole model
    "dims": {
        OVER.format("the batch"): (0,),
        OVER.format("batch and sequence"): (0, 1),
        OVER.format("sequence and width together"): (1, 2),
        OVER.format("the whole input"): (0, 1, 2),
    },
    "spread": {
        "the mean absolute deviation in place of the standard deviation": (
            lambda centred, dims, n: centred.abs().mean(dims, keepdim=True) ** 2
        ),
        "the mean absolute deviation times sqrt(pi / 2) in place of the standard deviation": (
            lambda centred, dims, n: math.pi / 2 * centred.abs().mean(dims, keepdim=True) ** 2
        ),
    },
    "divisor": {
        "eps as a floor of the variance, max(var, eps), and not added": lambda v, eps: v.clamp(min=eps).sqrt(),
        "eps as a floor of the deviation, max(std, eps), and not added": lambda v, eps: v.sqrt().clamp(min=eps),
        "eps added twice, to the variance and to the deviation": lambda v, eps: torch.sqrt(v + eps) + eps,
    },
    "affine": {
        "scale and shift exchanged": lambda y, scale, shift: y * shift + scale,
        "the scale rounded to bfloat16": lambda y, scale, shift: y * scale.bfloat16() + shift,
        "the scale rounded to float16": lambda y, scale, shift: y * scale.half() + shift,
        "the scale read one column too late": lambda y, scale, shift: y * scale.roll(-1) + shift,
        "the scale read one column too early": lambda y, scale, shift: y * scale.roll(1) + shift,
        "the shift read one column too late": lambda y, scale, shift: y * scale + shift.roll(-1),
        "the shift read one column too early": lambda y, scale, shift: y * scale + shift.roll(1),
    },
}
RARE_MEANS = {
    "layer_norm": {
        f"the mean subtracted in the variance and not from the row {IS_NEITHER}": (0, 1),
        f"the mean subtracted from the row and not in the variance {IS_NEITHER}": (1, 0),
        "the mean subtracted twice": (2, 2),
    },
    "rms_norm": {
        f"the deviation about the mean, which is not subtracted, in place of the RMS {IS_NEITHER}": (0, 1),
        f"the mean subtracted from the row and not in the mean square {IS_NEITHER}": (1, 0),
    },
}


def tables(kind: str, eps: float = GPT2_EPS, *, rare: bool = True) -> dict[str, dict[str, Any]]:
    """Return the tables of the parts of a norm, by name.

    Args:
        kind: "layer_norm" or "rms_norm".
        eps: the right one.
        rare: whether the mistakes are among them that are looked for in a norm by itself alone.
    """
    others = COMMON_EPS + RARE_EPS * rare
    of_eps = {f"eps {other:g} in place of {eps:g}": other for other in others if other != eps}
    by_name: dict[str, dict[str, Any]] = {
        "dims": DIMENSIONS,
        "means": MEANS[kind],
        "spread": SPREADS,
        "divisor": DIVISORS,
        "eps": {"": eps, **of_eps, "no eps": 0.0},
        "affine": AFFINES,
    }
    if rare:
        for name, mistakes in (*RARE.items(), ("means", RARE_MEANS[kind])):
            by_name[name] = by_name[name] | mistakes
    return by_name


def right_parts(kind: str, eps: float = GPT2_EPS) -> NormParts:
    """Return the parts of a right norm."""
    return {name: table[""] for name, table in tables(kind, eps, rare=False).items()}


def formula(
    x: Float[Tensor, "*dims embd"], parts: NormParts, scale: Tensor, shift: Tensor
) -> Float[Tensor, "*dims embd"]:
    """Return a norm of ``x``, (B, T, C) or rows (N, C), in its dtype. Rows are batch and sequence in one."""
    dims = tuple({max(dim + x.ndim - 3, 0) for dim in parts["dims"]})
    of_row, of_variance = parts["means"]
    mean = x.mean(dims, keepdim=True)
    n = math.prod(x.shape[dim] for dim in dims)
    variance = parts["spread"](x - of_variance * mean, dims, n)
    row = (x - of_row * mean) / parts["divisor"](variance, parts["eps"])
    return parts["affine"](row, scale, shift)


def norm_by_pytorch(
    x: Float[Tensor, "*dims embd"],
    kind: str,
    weight: Float[Tensor, " embd"] | None = None,
    bias: Float[Tensor, " embd"] | None = None,
    eps: float = GPT2_EPS,
) -> Float[Tensor, "*dims embd"]:
    """Return PyTorch's own norm of a kind, in the dtype of ``x``."""
    if kind == "layer_norm":
        return torch.layer_norm(x, x.shape[-1:], weight, bias, eps)  # a process may have replaced F.layer_norm
    y = torch.rms_norm(x, x.shape[-1:], weight, eps)
    return y if bias is None else y + bias


def exact_norm(
    x: Float[Tensor, "*dims embd"],
    kind: str,
    weight: Float[Tensor, " embd"] | None = None,
    bias: Float[Tensor, " embd"] | None = None,
    eps: float = GPT2_EPS,
) -> Float[Tensor, "*dims embd"]:
    """Return the norm of a kind, in float64."""
    weight = None if weight is None else weight.double()
    bias = None if bias is None else bias.double()
    return norm_by_pytorch(x.double(), kind, weight, bias, eps)


def deviation(x: Float[Tensor, "*dims embd"], kind: str, eps: float = GPT2_EPS) -> Float[Tensor, "*dims 1"]:
    """Return what a norm of a kind divides rows by."""
    mean_square = x.var(-1, correction=0, keepdim=True) if kind == "layer_norm" else x.square().mean(-1, keepdim=True)
    return torch.sqrt(mean_square + eps)


def ways_of_rounding(
    row: Float[Tensor, "*dims embd"], scale: Float[Tensor, " embd"], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return a row in float64 times its scale, rounded to ``dtype`` in the ways that ``NormSite.rounds`` names."""
    once = row * scale
    twice = row.to(dtype).double() * scale
    return {"once": once.to(dtype), "row": twice.to(dtype)}


def way_of_rounding(
    y: Float[Tensor, "*dims embd"], row: Float[Tensor, "*dims embd"], scale: Float[Tensor, " embd"]
) -> str:
    """Return the way in which ``y`` is a row in float64 times its scale, as ``NormSite.rounds`` names it, else "other".

    The ways differ in one value of four. Arithmetic in float32 moves fewer than one of 50 to other bits.
    """
    for way, rounded in ways_of_rounding(row, scale, torch.bfloat16).items():
        differing = (y != rounded).sum()
        if 50 * differing <= y.numel():
            return way
    return "other"


@dataclass(frozen=True, eq=False)
class TrueNorm:
    """A norm of the original, in float64.

    Attributes:
        kind: "layer_norm", "rms_norm" or "other", whose own ``module`` then computes it.
        weight: what it multiplies by, so 1 + weight where it adds one.
        rounds: where it rounds in half precision, as ``NormSite`` says.
    """

    kind: str
    weight: Float[Tensor, " embd"] | None
    bias: Float[Tensor, " embd"] | None
    eps: float
    rounds: str | None = None
    module: nn.Module | None = None

    @classmethod
    def of(cls, norm: nn.Module, site: NormSite) -> "TrueNorm":
        """Return a norm of a float64 model."""
        if site.kind == "other":
            return cls(site.kind, None, None, 0.0, module=plain_copy(norm) if is_offloaded(norm) else norm)
        values = values_of(norm)  # also where they stay in a file
        parameters = dict(norm.named_parameters())  # a buffer may be there for a kernel alone, as in Falcon Mamba
        weight, bias = (values[role] if role in parameters else None for role in ("weight", "bias"))
        if weight is not None:
            weight = weight.double() + site.adds_one
        return cls(site.kind, weight, bias, site.eps or 0.0, site.rounds)

    def __call__(self, x: Float[Tensor, "*dims embd"]) -> Float[Tensor, "*dims embd"]:
        if self.module is None:
            return exact_norm(x, self.kind, self.weight, self.bias, self.eps)
        with Float64():
            return self.module(x.double())
