"""The registered norms: a name, a class, and whether it claims to be LayerNorm exactly.

To add a norm, add a file here with a class under ``@register``. The first look-up imports every module::

    @register("centred", exact=False)
    class Centred(LayerNorm):
        \"\"\"Subtracts the mean of the row, and does not divide.\"\"\"
        def standardize(self, x):
            return x - x.mean(dim=self.row_dims, keepdim=True)
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from minigpt.errors import NormError, near

NormSpec = str | type[nn.Module] | Callable[..., nn.Module]
KINDS = {"layer_norm": "a LayerNorm", "rms_norm": "an RMSNorm"}


class NormInfo(NamedTuple):
    """Facts about a registered norm, which need no building of it."""

    cls: type[nn.Module]
    claim: str  # "layer_norm", "rms_norm", or "" for neither: what it computes in a model of that norm is the same
    obstacle: Callable[[torch.device | None], str | None] | None = None  # see register
    parameter: str | None = None  # of its constructor: a number that may follow the name, as in "mix:0.75"

    @property
    def exact(self) -> bool:
        """True if it claims to compute LayerNorm. Another one is expected to drift and fail parity in a GPT-2."""
        return self.claim == "layer_norm"

    @property
    def available(self) -> bool:
        """True if it can run here. Imports nothing to find out."""
        return self.reason is None

    @property
    def reason(self) -> str | None:
        """The reason why it is not available, and what to do; None if it is."""
        return self.reason_on(None)

    def reason_on(self, device: torch.device | None) -> str | None:
        """Return why it cannot run on ``device``, or, for None, on any device here; None if it can."""
        if self.obstacle is None:
            return None
        return self.obstacle(device)

    @property
    def summary(self) -> str:
        """The first line of its class's docstring, without the marks of code."""
        line = (self.cls.__doc__ or "").strip().partition("\n")[0]
        return line.replace("``", "")

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as JSON types."""
        return {
            "exact": self.exact,
            "claim": self.claim,
            "available": self.available,
            "reason": self.reason,
            "summary": self.summary,
        }


NormClass = TypeVar("NormClass", bound=type[nn.Module])

_REGISTRY: dict[str, NormInfo] = {}


def register(
    name: str,
    exact: bool | str = True,
    *,
    obstacle: Callable[[torch.device | None], str | None] | None = None,
    parameter: str | None = None,
) -> Callable[[NormClass], NormClass]:
    """Class decorator: make ``cls(normalized_shape, eps=..., bias=...)`` available under ``name``.

    Args:
        exact: what it claims to be: True or "layer_norm", "rms_norm", or False for neither. It becomes the attribute
            ``exact`` of the class, which subclasses inherit.
        parameter: the constructor's argument that a number behind the name sets, as in "mix:0.75".
        obstacle: a function of a device, or of None for all devices here. It returns why the norm cannot run there, or
            None.

    Raises:
        NormError: if another class has that name, or there is no such claim.
    """

    claim = claim_named(exact)

    def add(cls: NormClass) -> NormClass:
        taken = _REGISTRY.get(name)
        if taken is not None:
            owner = f"{taken.cls.__module__}.{taken.cls.__qualname__}"
            if owner != f"{cls.__module__}.{cls.__qualname__}":  # the same class may be imported again
                raise NormError(f"the norm name {name!r} is taken by {owner}")
        cls.exact = exact  # pyright: ignore[reportAttributeAccessIssue]
        _REGISTRY[name] = NormInfo(cls, claim, obstacle, parameter)
        return cls

    return add


def claim_named(exact: bool | str) -> str:
    """Return the claim that an attribute ``exact`` makes: "layer_norm", "rms_norm", or "" for neither.

    Raises:
        NormError: if it is another text.
    """
    if exact not in (True, False, *KINDS):
        raise NormError(f"exact must be True, False, {' or '.join(KINDS)}, got {exact!r}")
    if isinstance(exact, str):
        return exact
    if exact:
        return "layer_norm"
    return ""


def available() -> dict[str, NormInfo]:
    """Return every registered norm by name. ``.available`` is False for those that cannot run here."""
    _import_every_norm()
    return dict(_REGISTRY)


def find(name: object) -> tuple[NormInfo, str] | None:
    """Return the registered norm of a name, and the number behind it ("" without one); None if there is none."""
    if not isinstance(name, str):
        return None
    base, colon, number = name.partition(":")
    info = _REGISTRY.get(base) or available().get(base)
    if info is None:
        return None
    if colon and info.parameter is None:
        return None
    return info, number


def is_registered(name: object) -> bool:
    """Return True for a registered name, also with a number behind it where the norm takes one: "mix:0.75"."""
    return find(name) is not None


def lookup(name: str) -> Callable[..., nn.Module]:
    """Return the class of a registered name; for "mix:0.75" a function that sets the number.

    Raises:
        NormError: if there is none, it cannot run here, or what follows the name is no number.
    """
    match = find(name)
    if match is None:
        norms = available()
        hint = f"registered are {', '.join(sorted(norms))};"
        if meant := near(name, norms):
            hint = f"did you mean {meant}?"
        raise NormError(f"unknown norm {name!r}; {hint} your own class is package.module:Name or path/to/file.py:Name")
    info, number = match
    base, colon, _ = name.partition(":")
    if reason := info.reason_on(None):
        raise NormError(f"norm {base!r} {reason}")
    if not colon:
        return info.cls
    try:
        return functools.partial(info.cls, **{str(info.parameter): float(number)})
    except ValueError:
        raise NormError(f"norm {base!r} takes a number behind its name, as in {base}:0.5, got {name!r}") from None


def registered_name(norm: object) -> str | None:
    """Return the name of a registered class, or of a module of one with its number; None if it is not registered."""
    cls = norm
    if not isinstance(norm, type):
        cls = type(norm)
    for name, info in available().items():
        if info.cls is not cls:
            continue
        if info.parameter is None or not isinstance(norm, nn.Module):
            return name
        return f"{name}:{getattr(norm, info.parameter)}"
    return None


def require_on(norm: object, device: torch.device) -> None:
    """Check, after a registered norm was used on ``device``, that it was computed there as its name says.

    Raises:
        NormError: if it was not, for example because its kernels failed on the device.
    """
    info = _REGISTRY.get(norm) if isinstance(norm, str) else None
    if info is not None and (reason := info.reason_on(device)):
        raise NormError(f"norm {norm!r} cannot be judged: it {reason}")


@functools.cache
def _import_every_norm() -> None:
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, package + "."):
        importlib.import_module(module.name)
