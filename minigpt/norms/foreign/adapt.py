"""Somebody else's module -> a norm of a GPT-2, with a ``weight`` and a ``bias``, whatever it calls them itself.

A module that calls them so needs nothing but a watch on what it returns. Any other is held by an ``AdaptedNorm``, which
owns the two Parameters and lends them to it.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from minigpt.errors import NormError
from minigpt.norms.add import own_addition
from minigpt.norms.foreign.construct import EPS, title
from minigpt.norms.foreign.watch import Watched, WatchedSum, watched
from minigpt.norms.textbook import LayerNorm

SCALES = ("weight", "gamma", "scale", "g", "gain", "a_2")
SAME_EPS = "as the model's"  # so ends a note on an eps that could not be set, and need not be
PERHAPS_A_SCALE = {"alpha", "a", "w"}  # where it is as wide as a row; DyT's alpha is one number, and no scale
SHIFTS = ("bias", "beta", "shift", "b", "offset", "b_2")

Places = dict[str, list[str]]  # of a role, "weight" or "bias": the names that one Parameter has in a module


def adapt(module: nn.Module, shape: tuple[int, ...], *, eps: float, bias: bool, takes_eps: bool) -> nn.Module:
    """``module`` as a norm with a ``weight`` and a ``bias`` (None unless ``bias``), which are its own scale and shift.

    Args:
        takes_eps: whether it could be told ``eps``.

    Raises:
        NormError: it has no scale, no shift for the model's, a parameter that is neither, or one of another shape.
    """
    if is_ours(type(module)):
        vars(module)["notes"] = _notes(module, eps, takes_eps)
        return module
    if isinstance(module, torch.jit.ScriptModule):
        raise NormError(f"{title(module)} is a TorchScript module, whose Parameters cannot be shared; give its class")
    places = _places(module, shape, bias)
    said = _notes(module, eps, takes_eps)
    is_plain = type(module).__call__ is nn.Module.__call__  # which comes to its forward, where it is watched
    if is_plain and places == {role: [role] for role in (("weight", "bias") if bias else ("weight",))}:
        module.forward = Watched(module, said)
        _watch_sums(module, module)
        return module
    return AdaptedNorm(module, places, shape, eps=eps, bias=bias, notes=said)


def is_ours(cls: object) -> bool:
    """Whether it is a norm of this package, which needs no adapting."""
    is_layer_norm = isinstance(cls, type) and issubclass(cls, LayerNorm)
    return is_layer_norm and cls.__module__.partition(".")[0] == __name__.partition(".")[0]


def notes(module: nn.Module) -> tuple[str, ...]:
    """What a reader should know of a norm in a model: that its class has an eps of its own, for one."""
    holds_them = isinstance(module, AdaptedNorm) or is_ours(type(module))
    return getattr(module if holds_them else module.forward, "notes", ())


def eps_of(module: nn.Module) -> set[float]:
    """Every eps that a norm holds, in itself or in a part of it."""
    return {
        value
        for part in module.modules()
        for name, value in vars(part).items()
        if EPS.fullmatch(name) and isinstance(value, float)
    }


def other_eps(module: nn.Module, eps: float) -> list[float]:
    """What of ``eps_of`` is not ``eps``, nor that in float32."""
    return sorted(value for value in eps_of(module) if not math.isclose(value, eps, rel_tol=1e-6))


class AdaptedNorm(nn.LayerNorm):
    """A norm that holds somebody else's module, and under ``weight`` and ``bias`` that module's scale and shift.

    The Parameters are registered here and nowhere else. The module finds them under its own names, at each use anew,
    so that whatever becomes of them here (moved, replaced, loaded, shared, trained) is what it computes with.

    To whoever treats norms apart from other layers it is one, as ours are.

    Attributes:
        norm: the module, of its own class but for where it looks for the two.
        normalized_shape: the trailing dimensions that are one row.
        eps: what the class was asked to add. ``notes`` says where it would not.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, norm: nn.Module, places: Places, shape: tuple[int, ...], *, eps: float, bias: bool, notes: tuple[str, ...]
    ) -> None:
        nn.Module.__init__(self)
        self.normalized_shape, self.eps, self.elementwise_affine, self.notes = shape, eps, True, notes
        self.weight = norm.get_parameter(places["weight"][0])
        self.bias = norm.get_parameter(places["bias"][0]) if bias else None
        if not bias:
            _hold_at_zero(norm, places.pop("bias", []))
        _borrow(norm, places, self)
        self.norm = norm
        _watch_sums(norm, self)

    def forward(self, x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What the module makes of ``x`` (..., *normalized_shape): same shape, dtype and device, or a NormError."""
        return watched(self.norm, self.norm, x)

    def extra_repr(self) -> str:
        notes = "".join(f"; {note}" for note in self.notes)
        return f"{self.normalized_shape}, eps={self.eps}, bias={self.bias is not None}{notes}"


def _places(module: nn.Module, shape: tuple[int, ...], bias: bool) -> Places:
    """Under which names a module has its scale and its shift; a shift that was not asked for, too.

    Raises:
        NormError: one of them is not there, or there twice, or of another shape; or a parameter is neither.
    """
    places: Places = {}
    unknown: list[str] = []
    for names in _names_of_each_parameter(module):
        role = _role(names) or _role_by_shape(module, names, shape)
        if role is None:
            unknown.append(names[0])
        elif role in places:
            what = "scales" if role == "weight" else "shifts"
            raise NormError(f"{title(module)} has two {what}, {places[role][0]} and {names[0]}; a norm has one")
        else:
            places[role] = names
    if unknown and not isinstance(module, LayerNorm):
        raise NormError(
            f"{title(module)} has parameters of no known role: {', '.join(unknown)}; known are {', '.join(SCALES)} for "
            f"the scale and {', '.join(SHIFTS)} for the shift, and a subclass of minigpt.LayerNorm may add others"
        )
    for role, what, known in (("weight", "scale", SCALES), ("bias", "shift", SHIFTS)):
        if role in places:
            _require_shape(module, what, places[role][0], shape)
        elif role == "weight" or bias:
            buffers = [name for name, buffer in module.named_buffers()
                       if name.rpartition(".")[2] in known and buffer.shape == shape]  # fmt: skip
            missing = f"has no {what} under any of the names {', '.join(known)}"
            held = f"holds its {what}, {', '.join(buffers)}, as a buffer, and not as a Parameter"
            raise NormError(f"{title(module)} {held if buffers else missing}, so the model's would be lost")
    return places


def _names_of_each_parameter(module: nn.Module) -> list[list[str]]:
    if isinstance(module, LayerNorm):  # whose roles are known; what a subclass adds stays as it is built
        return [[name] for name in ("weight", "bias") if getattr(module, name) is not None]
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def _role(names: list[str]) -> str | None:
    called = _own_names(names)
    return "weight" if called & set(SCALES) else "bias" if called & set(SHIFTS) else None


def _role_by_shape(module: nn.Module, names: list[str], shape: tuple[int, ...]) -> str | None:
    parameter = module.get_parameter(names[0])
    may_be = bool(_own_names(names) & PERHAPS_A_SCALE) and not is_lazy(parameter)
    return "weight" if may_be and parameter.shape == shape else None


def _own_names(names: list[str]) -> set[str]:
    """Without those of the modules that they are in, and without underscores before them."""
    return {name.rpartition(".")[2].lstrip("_") for name in names}


def _require_shape(module: nn.Module, what: str, name: str, shape: tuple[int, ...]) -> None:
    parameter = module.get_parameter(name)
    if is_lazy(parameter):
        raise NormError(f"the {what} {name} of {title(module)} has no shape before its first forward")
    if parameter.shape != shape:
        raise NormError(f"the {what} {name} of {title(module)} is {tuple(parameter.shape)}, not {shape}")


def _notes(module: nn.Module, eps: float, takes_eps: bool) -> tuple[str, ...]:
    """Where it does not add the eps that the model has."""
    if others := ", ".join(f"{value:g}" for value in other_eps(module, eps)):
        return (f"eps is {others} in {title(module)}, where the model's is {eps:g}",)
    if takes_eps:
        return ()
    return (f"eps cannot be set in {title(module)}" + (f"; it is {eps:g}, {SAME_EPS}" if eps_of(module) else ""),)


def _watch_sums(norm: Any, holder: Any) -> None:
    """Let ``holder`` offer, watched, the residual addition that ``norm`` has fused in, if it has."""
    if isinstance(inspect.getattr_static(norm, "add_norm", None), property):
        raise NormError(f"add_norm of {title(norm)} is a property; make it a method of (residual, delta)")
    if own_addition(norm) is not None:
        vars(holder)["add_norm"] = WatchedSum(norm)  # past nn.Module's bookkeeping: it may stand for a child


def _hold_at_zero(norm: nn.Module, names: list[str]) -> None:
    """Where the model has no shift, a class that always has one adds zeros, and has nothing there to train or save."""
    for name in names:
        owner, _, own_name = name.rpartition(".")
        zeros = torch.zeros_like(norm.get_parameter(name), requires_grad=False)
        del norm.get_submodule(owner)._parameters[own_name]
        norm.get_submodule(owner).register_buffer(own_name, zeros, persistent=False)


def _borrow(norm: nn.Module, places: Places, lender: nn.Module) -> None:
    """From now on ``norm``, at each of these names, has what ``lender`` has under the role."""
    loans: dict[str, dict[str, str]] = {}
    for role, names in places.items():
        for name in names:
            owner, _, own_name = name.rpartition(".")
            loans.setdefault(owner, {})[own_name] = role
    for owner, roles in loans.items():
        borrower = norm.get_submodule(owner)
        for own_name in roles:
            del borrower._parameters[own_name]
        borrower.__dict__["_lender"] = lender  # past nn.Module's bookkeeping: a lender is no child
        borrower.__class__ = _borrowing(type(borrower), tuple(roles.items()))


@functools.cache
def _borrowing(cls: type[nn.Module], roles: tuple[tuple[str, str], ...]) -> type[nn.Module]:
    """``cls``, but that it looks up a few names at its lender."""

    def reduced(self: nn.Module, protocol: Any) -> Any:  # pickled by the class that can be imported
        return _unfilled, (cls, roles), self.__dict__

    lookups = {name: property(_lenders(role)) for name, role in roles}
    like_cls = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    members: dict[str, Any] = {**like_cls, **lookups, "__reduce_ex__": reduced}
    return type(cls.__name__, (cls,), members)


def _lenders(role: str) -> Callable[[Any], Tensor | None]:
    return lambda borrower: getattr(borrower._lender, role)  # an operator.attrgetter cannot be compiled


def _unfilled(cls: type[nn.Module], roles: tuple[tuple[str, str], ...]) -> nn.Module:
    borrowing = _borrowing(cls, roles)
    return borrowing.__new__(borrowing)
