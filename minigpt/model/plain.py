"""Whether a module is as we made it, without hooks: only then may its work be done in another way."""

from typing import Any

from torch import nn

from minigpt.norms.add import has_hooks, has_own_hooks, hooks_of_all


def is_plain(method: Any, function: Any) -> bool:
    """Whether a bound method is ``function``: no subclass's, and none that somebody has put in its place."""
    return getattr(method, "__func__", None) is function


def is_matrix(layer: nn.Module) -> bool:
    """Whether a layer is the product with its weight, and nothing else."""
    return is_plain(layer.forward, nn.Linear.forward) and layer.bias is None and not has_hooks(layer)


def is_watched(model: nn.Module) -> bool:
    """Whether hooks wait for the call of any of its modules. It is asked at every step, so it walks by itself."""
    waiting: list[nn.Module | None] = [model]
    while waiting:
        part = waiting.pop()
        if part is not None:
            if has_own_hooks(part):
                return True
            waiting += part._modules.values()
    return hooks_of_all()
