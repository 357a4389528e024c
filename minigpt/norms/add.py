"""The residual addition and the norm of the sum, in one pass if the norm offers that."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules import module as of_all


def add_norm(
    norm: nn.Module, residual: Float[Tensor, "*dims"], delta: Float[Tensor, "*dims"]
) -> tuple[Float[Tensor, "*dims"], Float[Tensor, "*dims"]]:
    """Return ``residual + delta`` and ``norm`` of that sum, both (..., *normalized_shape).

    A norm that has a method ``add_norm(residual, delta)`` computes both. If it has hooks it is called instead, since
    hooks see only calls.
    """
    fused = own_addition(norm)
    if fused is not None and not has_hooks(norm):
        return fused(residual, delta)
    total = residual + delta
    return total, norm(total)


def parts_of(x: Float[Tensor, "*dims"]) -> tuple[Float[Tensor, "*dims"], Float[Tensor, "*dims"]]:
    """Return two tensors that add up to ``x`` without rounding, each of them unlike ``x``."""
    is_even = torch.arange(x.shape[-1], device=x.device) % 2 == 0
    return torch.where(is_even, x, 0), torch.where(is_even, 0, x)


def norm_by_addition(addition: Callable[..., Any], x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
    """Return the norm of ``x`` by an ``add_norm`` that gets ``x`` in two parts."""
    return addition(*parts_of(x))[1]


def own_addition(norm: nn.Module) -> Callable[..., Any] | None:
    """Return the ``add_norm`` of a norm; None if it has none."""
    found = getattr(norm, "add_norm", None)
    return found if callable(found) else None


def has_hooks(module: nn.Module) -> bool:
    """Return True if hooks fire when the module is called: its own, or those on all modules."""
    return has_own_hooks(module) or hooks_of_all()


def has_own_hooks(module: nn.Module) -> bool:
    """Return True if this module has hooks."""
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


def hooks_of_all() -> bool:
    """Return True if there are hooks on all modules at once."""
    return bool(of_all._has_any_global_hook())


def is_watched(model: nn.Module) -> bool:
    """Return True if any of its modules has hooks."""
    return hooks_of_all() or any(map(has_own_hooks, model.modules()))
