"""From what a user calls a norm to a module that a GPT-2 can hold."""

from collections.abc import Callable, Sequence

from torch import nn

from minigpt.errors import NormError
from minigpt.norms.foreign.adapt import adapt, is_ours
from minigpt.norms.foreign.construct import construct, naming
from minigpt.norms.foreign.locate import locate
from minigpt.norms.textbook import row_shape

NormSpec = str | type[nn.Module] | Callable[..., nn.Module]


def build(norm: NormSpec, normalized_shape: int | Sequence[int], *, eps: float = 1e-5, bias: bool = True) -> nn.Module:
    """A norm over the trailing ``normalized_shape``, with a ``weight`` and, if ``bias``, a ``bias`` of that shape.

    Somebody else's class is taken as it is written: its constructor's signature says how to call it, and its scale and
    shift, under any name of ``adapt.SCALES`` and ``adapt.SHIFTS``, are the module's ``weight`` and ``bias``.
    ``adapt.notes`` says what it would not take, such as an eps.

    Args:
        norm: a registered name, "package.module:Name", "path/to/file.py:Name", a class, or any function that makes a
            module.
        eps: passed on where the class takes one.
        bias: whether there is a shift; passed on where the class takes such a flag.

    Raises:
        NormError: the name is unknown, the class cannot be found, imported or constructed, is no ``torch.nn.Module``,
            or its parameters are not a scale and a shift of that shape.
    """
    make = locate(norm) if isinstance(norm, str) else norm
    if not callable(make):
        raise NormError(f"a norm is a name, a class, or a function that makes one, not {make!r:.100}")
    if is_ours(make):
        return make(normalized_shape, eps=eps, bias=bias)
    shape = row_shape(normalized_shape)
    module, takes_eps = construct(make, shape, eps=eps, bias=bias)
    with naming(make):
        return adapt(module, shape, eps=eps, bias=bias, takes_eps=takes_eps)
