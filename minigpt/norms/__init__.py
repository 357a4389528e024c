"""Every LayerNorm, one file each. They know no config and no model."""

import importlib
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from minigpt.choices import AMOUNT, KEEP, check_keep
from minigpt.errors import NormError
from minigpt.norms.frozen import AtPositions
from minigpt.norms.registry import NormInfo, NormSpec, available, find, is_registered, lookup, register
from minigpt.norms.textbook import LayerNorm

if TYPE_CHECKING:
    from minigpt.norms.foreign.builder import build_raw, is_exact, is_ours, name_of, notes

__all__ = [
    "AtPositions",
    "LayerNorm",
    "NormInfo",
    "NormSpec",
    "available",
    "build",
    "build_raw",
    "is_exact",
    "is_ours",
    "is_registered",
    "lookup",
    "name_of",
    "notes",
    "register",
]


def build(
    norm: NormSpec,
    normalized_shape: int | Sequence[int],
    *,
    eps: float = 1e-5,
    bias: bool = True,
    keep: Collection[str] = KEEP,
) -> nn.Module:
    """Return a norm over the trailing ``normalized_shape`` with a ``weight`` and a ``bias`` of that shape.

    Somebody else's class is taken as it is written. Its constructor's signature says how to call it. Its scale and
    shift, under any of ``adapt.SCALE_NAMES`` and ``adapt.SHIFT_NAMES``, are the module's ``weight`` and ``bias``. One
    that the class lacks is applied to its output. ``norms.notes`` names that, and an eps that the class does not take.

    Args:
        norm: a registered name, "package.module:Name", "path/to/file.py:Name", a class, a function that makes a
            module, or a function of arrays, ``norm(x, weight, bias, eps)``, whose attribute ``arrays`` names their
            package.
        eps: passed on if the class takes one.
        bias: whether there is a shift; passed on if the class takes such a flag.
        keep: which of "scale" and "shift" to add to a class that lacks them.

    Raises:
        NormError: if the name is unknown, the class cannot be found, imported or constructed, or is not a
            ``torch.nn.Module``, or if ``eps`` is negative or not finite.
    """
    if not AMOUNT.accepts(eps):
        raise NormError(f"must {AMOUNT.requirement}, got {eps!r}", argument="eps")
    if isinstance(norm, str) and find(norm) is not None:
        check_keep(keep)
        return lookup(norm)(normalized_shape, eps=eps, bias=bias)
    from minigpt.norms.foreign.builder import Builder

    return Builder(norm).build(normalized_shape, eps=eps, bias=bias, keep=keep)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import what somebody else's norms need when it is first used."""
        return getattr(importlib.import_module("minigpt.norms.foreign.builder"), name)
