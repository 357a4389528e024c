"""The residual addition and the norm that reads its sum, in one pass where the norm offers that."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules import module as of_all


def add_norm(
    norm: nn.Module, residual: Float[Tensor, "*dims"], delta: Float[Tensor, "*dims"]
) -> tuple[Float[Tensor, "*dims"], Float[Tensor, "*dims"]]:
    """``residual + delta`` and ``norm`` of that sum, both (..., *normalized_shape).

    A norm with an ``add_norm(residual, delta)`` of its own computes both, unless it has hooks: they see what a norm is
    called with.
    """
    fused = own_addition(norm)
    if fused is not None and not has_hooks(norm):
        return fused(residual, delta)
    total = residual + delta
    return total, norm(total)


def parts_of(x: Float[Tensor, "*dims"]) -> tuple[Float[Tensor, "*dims"], Float[Tensor, "*dims"]]:
    """Two that add up to ``x`` without any rounding, and neither of which could be taken for it."""
    is_even = torch.arange(x.shape[-1], device=x.device) % 2 == 0
    return torch.where(is_even, x, 0), torch.where(is_even, 0, x)


def norm_by_addition(addition: Callable[..., Any], x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
    """The norm of ``x`` by an ``add_norm`` that is given it in two parts."""
    return addition(*parts_of(x))[1]


def own_addition(norm: nn.Module) -> Callable[..., Any] | None:
    """The ``add_norm`` that a norm offers; None where it leaves the addition to others."""
    found = getattr(norm, "add_norm", None)
    return found if callable(found) else None


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks wait for the module's own call, and would miss it if others did its work."""
    return has_own_hooks(module) or hooks_of_all()


def has_own_hooks(module: nn.Module) -> bool:
    """Whether such hooks were put on this module."""
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


def hooks_of_all() -> bool:
    """Whether there are hooks on all modules at once."""
    return bool(of_all._has_any_global_hook())
