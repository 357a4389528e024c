"""LayerNorm with one part changed or left out, or a function of each element in its place: what papers publish."""

from typing import Any

import torch
from torch import Tensor, nn

from minigpt.errors import NormError
from minigpt.norms.registry import register
from minigpt.norms.textbook import LayerNorm, RowShape, Vectors


@register("std_eps", exact=False)
class StdEps(LayerNorm):
    """Divides by the deviation plus eps, (x - mean) / (std + eps), instead of sqrt(var + eps).

    The deviation is biased, divided by n, as LayerNorm's is. On ordinary rows the two differ in the fifth digit. On a
    constant row this one divides by eps, LayerNorm by its root.
    """

    def standardize(self, x: Vectors) -> Vectors:
        """Return the row at mean 0 and a deviation just below 1."""
        # each (..., 1); the gradient of this deviation at 0 is 0
        std, mean = torch.std_mean(x, dim=self.row_dims, correction=0, keepdim=True)
        return (x - mean) / (std + self.eps)


@register("rms", exact="rms_norm")
class RMSNorm(LayerNorm):
    """Divides by the root mean square and subtracts no mean (Zhang & Sennrich 2019, arXiv 1910.07467, equation 4).

    ``y = x / sqrt(mean(x^2) + eps) * weight + bias``. The paper has no shift; a pretrained GPT-2 has one, and keeps it.
    """

    def standardize(self, x: Vectors) -> Vectors:
        """Return the row at mean square 1."""
        return x / torch.sqrt(x.square().mean(dim=self.row_dims, keepdim=True) + self.eps)


@register("no_scale", exact=False)
class NoScale(LayerNorm):
    """Subtracts the mean and does not divide: ``y = (x - mean) * weight + bias``. ``eps`` has no effect."""

    def standardize(self, x: Vectors) -> Vectors:
        """Return the row at mean 0."""
        return x - x.mean(dim=self.row_dims, keepdim=True)


@register("no_affine", exact=False)
class NoAffine(LayerNorm):
    """Has no learned scale and shift: ``y = (x - mean) / sqrt(var + eps)`` (arXiv 2511.10566 removes them).

    The checkpoint's weight and bias stay in the model, unused, so that another norm can take its place.
    """

    def forward(self, x: Vectors) -> Vectors:
        """Standardize ``x`` (..., *normalized_shape); same shape and dtype out."""
        return self.standardize(x.to(torch.promote_types(x.dtype, torch.float32))).to(x.dtype)


@register("identity", exact=False)
class Identity(LayerNorm):
    """Returns its input, with no scale and shift: ``y = x``, a model without this norm.

    The checkpoint's weight and bias stay in the model, unused, so that another norm can take its place.
    """

    def forward(self, x: Vectors) -> Vectors:
        """Return a copy of ``x``."""
        return x.clone()


@register("detached", exact=False)
class Detached(LayerNorm):
    """Computes LayerNorm, but no gradient flows through mean and deviation (arXiv 2505.24293).

    The output is LayerNorm's. For the backward pass the norm is linear: each row is shifted and divided by constants.
    """

    def standardize(self, x: Vectors) -> Vectors:
        """Return the row at mean 0 and variance 1, linear in ``x`` for autograd."""
        mean = x.detach().mean(dim=self.row_dims, keepdim=True)  # (..., 1)
        var = (x.detach() - mean).square().mean(dim=self.row_dims, keepdim=True)
        return (x - mean) / torch.sqrt(var + self.eps)


@register("dyt", exact=False)
class DyT(LayerNorm):
    """Squeezes each element by itself, tanh(alpha * x) (Zhu et al. 2025, arXiv 2503.10622, equation 4).

    ``y = tanh(alpha * x) * weight + bias``. ``alpha`` is one learned number for each norm. ``eps`` has no effect.

    Args:
        alpha: its initial value; the paper's 0.5 is for models trained with it from the start.
    """

    def __init__(self, normalized_shape: RowShape, eps: float = 1e-5, *, bias: bool = True, alpha: float = 0.5) -> None:
        super().__init__(normalized_shape, eps=eps, bias=bias)
        self.alpha = nn.Parameter(torch.tensor([float(alpha)]))  # (1,), since sharding refuses what has no dimension

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name in self._parameters:
            saved = state_dict.get(f"{prefix}{name}")
            if isinstance(saved, Tensor) and saved.ndim == 0:  # by an earlier version
                state_dict[f"{prefix}{name}"] = saved.view(1)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def standardize(self, x: Vectors) -> Vectors:
        """Return each element within (-1, 1)."""
        return torch.tanh(self.alpha * x)


@register("hardtanh", exact=False)
class HardTanh(DyT):
    """Cuts each element off, ``y = clip(alpha * x, -1, 1) * weight + bias`` (arXiv 2604.23434)."""

    def standardize(self, x: Vectors) -> Vectors:
        """Return each element within [-1, 1]."""
        return (self.alpha * x).clamp(-1, 1)


@register("derf", exact=False)
class Derf(DyT):
    """Squeezes each element by itself, erf(alpha * x + s) (Chen et al. 2025, arXiv 2512.10938, equation 10).

    ``y = erf(alpha * x + s) * weight + bias``. ``alpha`` and ``s`` are one learned number each for each norm, and
    ``s`` is 0 initially. ``eps`` has no effect.
    """

    def __init__(self, normalized_shape: RowShape, eps: float = 1e-5, *, bias: bool = True, alpha: float = 0.5) -> None:
        super().__init__(normalized_shape, eps=eps, bias=bias, alpha=alpha)
        self.s = nn.Parameter(torch.zeros(1))

    def standardize(self, x: Vectors) -> Vectors:
        """Return each element within (-1, 1)."""
        return torch.erf(self.alpha * x + self.s)


@register("mix", exact=False, parameter="share")
class Mix(LayerNorm):
    """Mixes LayerNorm with its input, ``y = share * LayerNorm(x) + (1 - share) * x``; "mix:0.75" sets the share.

    Args:
        share: of LayerNorm, from 0 (the identity) to 1.
    """

    def __init__(self, normalized_shape: RowShape, eps: float = 1e-5, *, bias: bool = True, share: float = 0.5) -> None:
        super().__init__(normalized_shape, eps=eps, bias=bias)
        self.share = require_share(share, "share")

    def forward(self, x: Vectors) -> Vectors:
        """Return the mixture for ``x`` (..., *normalized_shape); same shape and dtype out."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return torch.lerp(wide, super().forward(wide), self.share).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, share={self.share}"


def require_share(value: float, argument: str) -> float:
    """Return ``value`` if it is from 0 to 1.

    Raises:
        NormError: if it is not.
    """
    if not 0 <= value <= 1:
        raise NormError(f"the {argument} of a norm must be from 0 to 1, got {value}")
    return float(value)
