"""Whether somebody's hooks must fire, so that a module has to be called."""

from torch import nn
from torch.nn.modules import module as global_hooks


def has_hooks(module: nn.Module) -> bool:
    """Return True if hooks fire when the module is called: its own, or those on all modules."""
    return _has_own_hooks(module) or _has_global_hooks()


def is_watched(*modules: nn.Module) -> bool:
    """Return True if hooks fire when any of these is called."""
    return _has_global_hooks() or any(map(_has_own_hooks, modules))


def _has_own_hooks(module: nn.Module) -> bool:
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


def _has_global_hooks() -> bool:
    return bool(global_hooks._has_any_global_hook())
