"""A norm at a site that multiplies by 1 + weight, as Gemma's and Nemotron's norms do."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from minigpt.norms.foreign.adapt import AdaptedNorm


class OnePlusNorm(nn.LayerNorm):
    """A norm that multiplies by its weight, at a site whose Parameter ``weight`` is smaller by one.

    The checkpoint's Parameters are registered here, under their names. So a checkpoint, an optimizer and a tied module
    see what they saw before. Before each call the norm is given 1 + weight.

    Half precision rounds that sum by as much as an output. So an RMSNorm's is given in float32, as Gemma does it.
    A LayerNorm's stays in the weight's dtype, as in Nemotron's code.

    Subclasses nn.LayerNorm, since transformers' Trainer spares norms from weight decay by their class.

    Args:
        norm: has a ``weight`` of the shape of a row.
        weight: the checkpoint's, (C).
        eps: the site's.
        is_wide: whether the sum is in float32, at least.
    """

    def __init__(self, norm: Any, weight: nn.Parameter, eps: float, is_wide: bool) -> None:
        nn.Module.__init__(self)
        self.normalized_shape, self.eps, self.elementwise_affine = tuple(weight.shape), eps, True
        self.norm, self.is_wide = norm, is_wide
        self.register_parameter("weight", weight)
        self.register_parameter("bias", norm.bias)
        self.loans = [name for name in ("weight", "bias") if name in norm._parameters]
        for name in self.loans:
            del norm._parameters[name]
        self._lend(None, None)

    def forward(self, x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the norm's output for ``x`` (..., C), scaled by 1 + weight."""
        self._lend(self._sum(), self.bias)
        return self.norm(x).to(x.dtype)

    def plain(self) -> Any:
        """Return the norm with Parameters of its own: ``weight`` is the sum. This module must not be used after it."""
        for name in self.loans:
            self.norm.__dict__.pop(name)
        values = {"weight": self._sum(), "bias": self.bias}
        for name in self.loans:
            value = values[name]
            copied = None if value is None else nn.Parameter(value.detach().clone(), requires_grad=value.requires_grad)
            self.norm.register_parameter(name, copied)
        return self.norm

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without what is lent, since a tensor that autograd made cannot be copied."""
        self._lend(None, None)
        return self.__dict__.copy()

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, 1 + weight"

    def _sum(self) -> Tensor:
        """Return 1 + weight (C)."""
        weight: Tensor = self.weight
        if self.is_wide:
            weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
        return weight + 1

    def _lend(self, weight: Tensor | None, bias: Tensor | None) -> None:
        """Give the norm a weight and a bias. They are not registered there, or a checkpoint would have them twice."""
        lent = {"weight": weight, "bias": bias}
        for name in self.loans:
            self.norm.__dict__[name] = lent[name]
        if weight is None and isinstance(self.norm, AdaptedNorm):
            self.norm.lend()


def inner_norm(module: nn.Module) -> nn.Module:
    """Return the norm that a ``OnePlusNorm`` holds, or the module itself."""
    return module.norm if isinstance(module, OnePlusNorm) else module


def plain_norm(module: nn.Module) -> nn.Module:
    """Return the norm that a ``OnePlusNorm`` holds with Parameters of its own, or the module itself."""
    return module.plain() if isinstance(module, OnePlusNorm) else module
