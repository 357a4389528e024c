"""Build a norm from what a user calls one, and what a norm is called and claims to be."""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import nn

from minigpt.choices import KEEP, check_keep
from minigpt.norms.foreign.adapt import AdaptedNorm, Scale, adapt, eps_notes, find_scale, inner_norm, is_ours
from minigpt.norms.foreign.adapt import notes as notes
from minigpt.norms.foreign.arrays import ArrayFunction, ArrayNorm, array_function, made
from minigpt.norms.foreign.construct import Call, construct, naming
from minigpt.norms.record import record_of
from minigpt.norms.registry import NormSpec, claim_named, find, registered_name


class Builder:
    """Build one norm many times.

    The class is read once, from a file too. For each shape, the arguments of its constructor and what its scale does
    are found once.

    Args:
        norm: what ``build`` takes.

    Raises:
        NormError: if the name is unknown, or the class cannot be found or imported.
    """

    def __init__(self, norm: NormSpec) -> None:
        self.norm = norm
        self.make = made(norm)
        self._function = array_function(self.make)
        self._found: dict[tuple[tuple[int, ...], float, bool], tuple[Call, Scale]] = {}

    def build(
        self,
        normalized_shape: int | Sequence[int],
        *,
        eps: float = 1e-5,
        bias: bool = True,
        keep: Collection[str] = KEEP,
    ) -> nn.Module:
        """Return a new norm, as ``build`` does, whose arguments these are. Raises as ``build``."""
        check_keep(keep)
        if is_ours(getattr(self.make, "func", self.make)):
            return _ours(self.make, normalized_shape, eps, bias)
        if isinstance(normalized_shape, int):
            normalized_shape = (normalized_shape,)
        shape = tuple(normalized_shape)
        if self._function is None:
            module, takes_eps, scale = self._constructed(shape, eps, bias)
        else:
            module = ArrayNorm(self._function, shape, eps=eps, bias=bias)
            takes_eps = module.takes_eps
            scale = find_scale(module, shape, probes=False)
        with naming(self.make):
            module = adapt(module, shape, scale, eps=eps, bias=bias, keep=keep, takes_eps=takes_eps)
        record_of(module).name = name_of(self.norm)
        return module

    def _constructed(self, shape: tuple[int, ...], eps: float, bias: bool) -> tuple[nn.Module, bool, Scale]:
        """Return a new module of the class, whether its constructor took the eps, and its scale."""
        key = shape, eps, bias
        if key in self._found:
            call, scale = self._found[key]
            return call.module(), call.takes_eps, scale
        module, call = construct(self.make, shape, eps=eps, bias=bias)
        with naming(self.make):
            scale = find_scale(module, shape)
        self._found[key] = call, scale
        return module, call.takes_eps, scale


def build_raw(norm: NormSpec, width: int, *, eps: float, bias: bool) -> nn.Module:
    """Return somebody else's norm over rows of a width as its class makes it. Raises as ``build``."""
    make = made(norm)
    module, call = construct(make, (width,), eps=eps, bias=bias)
    record_of(module).notes = eps_notes(module, eps, call.takes_eps)
    return module


def _ours(make: Callable[..., nn.Module], shape: int | Sequence[int], eps: float, bias: bool) -> nn.Module:
    """Return a norm of this package, with what a ``functools.partial`` of its class says."""
    keywords: dict[str, Any] = {"eps": eps, "bias": bias}
    if not isinstance(make, functools.partial):
        return make(shape, **keywords)
    with naming(make):
        module = make(shape, **keywords | make.keywords)
    others = eps_notes(module, eps, takes_eps=True)
    if others:
        record_of(module).notes = others
    return module


def is_same(norm: NormSpec, module: nn.Module) -> bool:
    """Return True if ``norm`` asks for the norm that a module is. "taper" asks for any gate."""
    info, number = find(norm) or (None, "")
    if info is None or number:
        return name_of(module) == name_of(norm)
    return type(module) is info.cls


def name_of(norm: object) -> str:
    """Return the name by which ``norm`` can be asked for again: a registered one, else "package.module:Name".

    A ``functools.partial`` has its class's name, and its arguments behind it.

    Args:
        norm: what ``build`` takes, or a module in a model.
    """
    if isinstance(norm, ArrayFunction):
        norm = norm.norm
    if isinstance(norm, str):
        return norm
    if isinstance(norm, functools.partial):
        positional = [repr(value) for value in norm.args]
        named = [f"{name}={value!r}" for name, value in norm.keywords.items()]
        return f"{name_of(norm.func)}({', '.join(positional + named)})"
    if isinstance(norm, nn.Module):
        norm = inner_norm(norm)
    name = registered_name(norm)
    if name:
        return name
    if isinstance(norm, nn.Module):
        return record_of(norm).name or name_of(type(norm))
    kind = norm
    if not hasattr(norm, "__qualname__"):
        kind = type(norm)
    return f"{kind.__module__}:{kind.__qualname__}"  # type: ignore[union-attr]


def claim_of(norm: object) -> str | None:
    """Return what a norm claims to compute: "layer_norm", "rms_norm", or "" for neither; None if it does not say.

    A registered norm says it by ``register``, any other class by an attribute ``exact``: one of the two kinds, True for
    a LayerNorm, or False. A kind of ``torch.nn.RMSNorm`` claims to be one.

    Args:
        norm: what ``build`` takes, or a module in a model.
    """
    if isinstance(norm, nn.Module):
        norm = inner_norm(norm)
    registered = find(norm)
    if registered is not None:  # it may be unavailable here
        return registered[0].claim
    make = made(norm)
    make = make.norm if isinstance(make, AdaptedNorm) else getattr(make, "func", make)
    claim = getattr(make, "exact", None)
    if isinstance(claim, bool | str):
        return claim_named(claim)
    cls = make if isinstance(make, type) else type(make)
    if issubclass(cls, nn.RMSNorm):
        return "rms_norm"
    return None


def is_exact(norm: object, kind: str = "layer_norm") -> bool:
    """Return whether a norm claims to compute what a site of a kind does; one that says nothing claims it.

    It is what the norm says, and not whether it is one.
    """
    claim = claim_of(norm)
    return claim is None or claim == kind
