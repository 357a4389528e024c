"""The registered norms: a name, a class, and whether it claims to be LayerNorm exactly.

One file a norm. Every module of this package is imported at the first look-up and registers what it holds, so a new
norm is a new file here and nothing else.
"""

import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from minigpt.errors import NormError


class NormInfo(NamedTuple):
    """What is known of a registered norm without building it."""

    cls: type[nn.Module]
    exact: bool  # claims to compute LayerNorm; an inexact norm is expected to drift, not to pass parity
    requires: str | None  # the optional package that it runs on
    obstacle: Callable[[torch.device | None], str | None] | None = None  # what else keeps it from running, see register

    @property
    def available(self) -> bool:
        """Whether it can run here; nothing is imported to find out."""
        return self.reason is None

    @property
    def reason(self) -> str | None:
        """Why it is not available, with the way out; None where it is."""
        return self.reason_on(None)

    def reason_on(self, device: torch.device | None) -> str | None:
        """Why it cannot run on that device; with None, on any of this machine."""
        if self.requires is not None and importlib.util.find_spec(self.requires) is None:
            return f"needs {self.requires}: pip install 'minigpt[{self.requires}]'"
        return self.obstacle(device) if self.obstacle else None

    @property
    def summary(self) -> str:
        """The first line of its class's documentation."""
        return (self.cls.__doc__ or "").strip().partition("\n")[0]

    def to_dict(self) -> dict[str, Any]:
        """As JSON's own types."""
        return {"exact": self.exact, "available": self.available, "reason": self.reason, "summary": self.summary}


NormClass = TypeVar("NormClass", bound=type[nn.Module])

_REGISTRY: dict[str, NormInfo] = {}


def register(
    name: str,
    exact: bool = True,
    *,
    requires: str | None = None,
    obstacle: Callable[[torch.device | None], str | None] | None = None,
) -> Callable[[NormClass], NormClass]:
    """Class decorator: make ``cls(normalized_shape, eps=..., bias=...)`` available under ``name``.

    Args:
        exact: whether it claims to be LayerNorm.
        requires: the optional package that it runs on, which is also the name of our extra that installs it.
        obstacle: asked what else keeps it from running on a device, or with None on any of this machine; its answer
            is None where nothing does.

    Raises:
        NormError: another class already has that name, it is no name, or ``cls`` is no ``torch.nn.Module`` class.
    """
    is_name = isinstance(name, str) and name.isprintable() and name == name.strip() != ""
    if not is_name or any(sign in name for sign in ":/\\") or name.endswith(".py"):
        raise NormError(f"{name!r} cannot be the name of a norm: it would be looked for in a file or a package")

    def add(cls: NormClass) -> NormClass:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise NormError(f"what is registered as {name!r} must be a torch.nn.Module class, not {cls!r}")
        taken = _REGISTRY.get(name)
        if taken is not None and (taken.cls.__module__, taken.cls.__qualname__) != (cls.__module__, cls.__qualname__):
            raise NormError(f"the norm name {name!r} is taken by {taken.cls.__module__}.{taken.cls.__qualname__}")
        _REGISTRY[name] = NormInfo(cls, exact, requires, obstacle)
        return cls

    return add


def available() -> dict[str, NormInfo]:
    """Every registered norm by name, those that cannot run here included (``.available`` is False)."""
    _import_every_norm()
    return dict(_REGISTRY)


def lookup(name: str) -> NormInfo:
    """The registered norm of that name.

    Raises:
        NormError: there is none, or it cannot run here.
    """
    norms = available()
    if name not in norms:
        raise NormError(
            f"unknown norm {name!r}; registered are {', '.join(sorted(norms))}, "
            "and a class of your own is package.module:Name or path/to/file.py:Name"
        )
    if not norms[name].available:
        raise NormError(f"norm {name!r} {norms[name].reason}")
    return norms[name]


@functools.cache
def _import_every_norm() -> None:
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, package + "."):
        importlib.import_module(module.name)
