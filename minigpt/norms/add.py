"""The residual addition and the norm that reads its sum, in one pass where the norm offers that."""

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn


def add_norm(
    norm: nn.Module, residual: Float[Tensor, "*dims"], delta: Float[Tensor, "*dims"]
) -> tuple[Float[Tensor, "*dims"], Float[Tensor, "*dims"]]:
    """``residual + delta`` and ``norm`` of that sum, both (..., *normalized_shape).

    A norm with an ``add_norm(residual, delta)`` of its own computes both, unless it has hooks: they see what a norm is
    called with.
    """
    fused: Any = getattr(norm, "add_norm", None)
    if callable(fused) and not has_hooks(norm):
        found: Any = fused(residual, delta)
        return found
    total = residual + delta
    return total, norm(total)


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks wait for the module's own call, and would miss it if others did its work."""
    return bool(module._forward_hooks or module._forward_pre_hooks)
