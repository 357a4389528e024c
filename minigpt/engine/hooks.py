"""Is a module as we made it, without hooks? Only then may its work be done in another way."""

from torch import nn

from minigpt.norms.add import has_own_hooks, hooks_of_all


def is_watched(model: nn.Module) -> bool:
    """Return True if any of its modules has hooks. Decoding asks at every step, so this walks the modules itself."""
    waiting: list[nn.Module | None] = [model]
    while waiting:
        part = waiting.pop()
        if part is not None:
            if has_own_hooks(part):
                return True
            waiting += part._modules.values()
    return hooks_of_all()
