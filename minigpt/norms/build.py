"""From what a user calls a norm to a module that a GPT-2 can hold."""

from collections.abc import Callable, Sequence

from torch import nn

from minigpt.errors import NormError
from minigpt.norms.registry import lookup

NormSpec = str | type[nn.Module] | Callable[..., nn.Module]


def build(norm: NormSpec, normalized_shape: int | Sequence[int], *, eps: float = 1e-5, bias: bool = True) -> nn.Module:
    """A norm over the trailing ``normalized_shape``, with a ``weight`` and, if ``bias``, a ``bias`` of that shape.

    Args:
        norm: a registered name, or a class or factory that takes ``(normalized_shape, eps=..., bias=...)``.

    Raises:
        NormError: the name is unknown, or what was built is not such a module.
    """
    make = lookup(norm).cls if isinstance(norm, str) else norm
    module = make(normalized_shape, eps=eps, bias=bias)
    if not isinstance(module, nn.Module):
        raise NormError(f"{norm!r} makes a {type(module).__name__}, not a torch.nn.Module")
    return module
