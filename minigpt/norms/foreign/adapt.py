"""Make a norm of a GPT-2 from somebody else's module.

A GPT-2's norm has a scale, ``weight``, and a shift, ``bias``. A ``torch.nn.LayerNorm`` with Parameters of these names
is used as it is. An ``AdaptedNorm`` wraps any other module, and owns the two. It gives them to the module under its own
names. If the module lacks one of them, the wrapper applies that one to the module's output. A ``OnePlusNorm`` holds a
norm at a site that multiplies by 1 + weight, as Gemma's and Nemotron's norms do.
"""

import copy
import math
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from minigpt.choices import is_number
from minigpt.errors import raised
from minigpt.norms.foreign.construct import EPS_NAME, require_same_shape, title
from minigpt.norms.record import record_of
from minigpt.norms.textbook import LayerNorm

# Names of a scale and of a shift, the most telling first. DyT has both an alpha and a weight.
SCALE_NAMES = ("weight", "gamma", "scale", "g", "gain", "a_2", "alpha", "a", "w")
SHIFT_NAMES = ("bias", "beta", "shift", "b", "offset", "b_2")

PACKAGE = __name__.partition(".")[0]

Paths = list[str]  # the names that one Parameter has in a module; tied Parameters have several


class Scale(NamedTuple):
    """The scale of somebody else's module.

    Attributes:
        paths: its names; none if the module has no scale that can be the model's.
        from_0: the name of a scale to which the module adds 1. It stays the module's own, and starts at 0.
        notes: a sentence if the module ignores it.
    """

    paths: Paths
    from_0: str = ""
    notes: tuple[str, ...] = ()


def adapt(
    module: nn.Module, shape: tuple[int, ...], scale_of: Scale, *, eps: float, bias: bool, keep: Collection[str],
    takes_eps: bool,
) -> nn.Module:  # fmt: skip
    """Return ``module``, or an ``AdaptedNorm`` around it, as a norm over ``shape``.

    Args:
        scale_of: what ``find_scale`` returns for a module of this class.
        bias: whether the model's norm has a shift.
        keep: which of "scale" and "shift" to add if the module has none.
        takes_eps: whether the module's constructor took ``eps``.
    """
    notes = eps_notes(module, eps, takes_eps)
    if not isinstance(module, LayerNorm):
        scale = scale_of.paths
        if scale_of.from_0:
            nn.init.zeros_(module.get_parameter(scale_of.from_0))
        shift: Paths = []
        if bias:
            shift = _find(module, SHIFT_NAMES, shape)
        if not scale and "scale" in keep:
            shift = []  # applied to the output too, so that it comes after the scale
        lacking = []
        if not scale:
            lacking.append("scale")
        if bias and not shift:
            lacking.append("shift")
        notes += scale_of.notes + _keep_notes(module, shape, lacking, keep)
        beside = [what for what in lacking if what in keep]
        is_as_named = scale in ([], ["weight"]) and shift in ([], ["bias"])  # a second name would keep the old one
        if beside or not is_as_named or not isinstance(module, nn.LayerNorm):
            module = AdaptedNorm(module, shape, scale, shift, beside, eps)
    record_of(module).notes = notes
    return module


def is_ours(cls: object) -> bool:
    """Return True if ``cls`` is a norm of this package."""
    if not (isinstance(cls, type) and issubclass(cls, LayerNorm)):
        return False
    return cls.__module__.partition(".")[0] == PACKAGE


def notes(module: nn.Module) -> tuple[str, ...]:
    """Return what a reader should know of a norm in a model: another eps, a shift that its class lacks."""
    inner = module.norm if isinstance(module, AdaptedNorm) else module
    return record_of(module).notes + getattr(inner, "remarks", ())


def eps_of(module: nn.Module) -> set[float]:
    """Return every eps that a norm and its parts hold."""
    return {value for value in _every_eps(module) if value is not None and is_number(value)}


def _every_eps(module: nn.Module) -> list[float | None]:
    values = []
    for part in module.modules():
        for name, value in vars(part).items():
            if EPS_NAME.fullmatch(name):
                values.append(value)
    return values


def other_eps(module: nn.Module, eps: float) -> list[float]:
    """Return the values of ``eps_of`` that differ from ``eps`` by more than float32 rounds."""
    return sorted(value for value in eps_of(module) if not math.isclose(value, eps, rel_tol=1e-6))


class AdaptedNorm(nn.LayerNorm):
    """Somebody else's norm with a GPT-2's ``weight`` and ``bias``.

    The two Parameters are registered here and nowhere else, so a checkpoint has them under the usual names. Before each
    call the module is given them under its own names. All other parameters stay the module's.

    Subclasses nn.LayerNorm, since transformers' Trainer spares norms from weight decay by their class.

    Args:
        norm: the module.
        shape: the trailing dimensions that are one row.
        scale, shift: the module's own names for the two, or none.
        beside: what of "scale" and "shift" to apply to the module's output.
        eps: the model's.
    """

    def __init__(
        self, norm: nn.Module, shape: tuple[int, ...], scale: Paths, shift: Paths, beside: Collection[str], eps: float
    ) -> None:
        nn.Module.__init__(self)
        self.normalized_shape = shape
        self.eps = eps
        self.elementwise_affine = True
        self.multiplies = "scale" in beside
        self.adds = "shift" in beside
        device = next((parameter.device for parameter in norm.parameters()), None)
        weight = bias = None
        if scale:
            weight = norm.get_parameter(scale[0])
        elif self.multiplies:
            weight = nn.Parameter(torch.ones(shape, device=device))
        if shift:
            bias = norm.get_parameter(shift[0])
        elif self.adds:
            bias = nn.Parameter(torch.zeros(shape, device=device))
        self.register_parameter("weight", weight)
        self.register_parameter("bias", bias)
        self.norm = norm
        self._loans: list[tuple[nn.Module, str, str]] = []  # a module, its name for what it borrows, and ours
        for role, paths in (("weight", scale), ("bias", shift)):
            for path in paths:
                owner, _, name = path.rpartition(".")
                self._loans.append((norm.get_submodule(owner), name, role))
        for borrower, name, _ in self._loans:
            del borrower._parameters[name]
        self.lend()

    def forward(self, x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the module's output for ``x`` (..., *normalized_shape), with the scale and shift that it lacks."""
        self.lend()
        y = self.norm(x)
        require_same_shape(y, x, self.norm)  # or a scale would spread a smaller one
        return self.completed(y)

    def extra_repr(self) -> str:
        arguments = f"{self.normalized_shape}, eps={self.eps}, bias={self.bias is not None}"
        return "; ".join((arguments, *notes(self)))

    def lend(self) -> None:
        """Give the module the present weight and bias, which torch.func may replace for one call."""
        for borrower, name, role in self._loans:
            borrower.__dict__[name] = getattr(self, role)  # not registered, or a checkpoint would have it twice

    def completed(self, y: Tensor) -> Tensor:
        """Return ``y`` with what the module lacks, rounded once more."""
        if not (self.multiplies or self.adds):
            return y
        row = y.to(torch.promote_types(y.dtype, torch.float32))
        if self.multiplies:
            row = row * self.weight
        if self.adds:
            row = row + self.bias
        return row.to(y.dtype)


def find_scale(module: nn.Module, shape: tuple[int, ...], *, probes: bool = True) -> Scale:
    """Return the scale of a module.

    Some classes multiply by 1 + weight, for example Gemma's. The model's scale would be wrong there. That weight stays
    the module's own, and starts at 0, where it changes nothing.

    Args:
        probes: whether to look at outputs for what the scale does.
    """
    if isinstance(module, LayerNorm):
        return Scale([])
    paths = _find(module, SCALE_NAMES, shape)
    if not paths or not probes:
        return Scale(paths)
    name = paths[0]
    scale = module.get_parameter(name)
    if scale.is_meta:
        return Scale(paths)
    try:
        at_0 = _output_at(0, module, name, shape)
        at_1 = _output_at(1, module, name, shape)
    except raised():
        parameters = [scale]
        for path in _find(module, SHIFT_NAMES, shape)[:1]:
            parameters.append(module.get_parameter(path))
        multiplies_by_more = not any(parameter.any() for parameter in parameters)
    else:
        if torch.equal(at_0, at_1):
            return Scale(paths, notes=(f"{title(module)} ignores its {name}: the output does not depend on it",))
        multiplies_by_more = bool(at_0.isfinite().all() and at_0.any())
    if not multiplies_by_more:
        return Scale(paths)
    return Scale([], from_0=name)


@torch.no_grad()
def _output_at(value: float, module: nn.Module, path: str, shape: tuple[int, ...]) -> Tensor:
    """Return the output for two rows, with the scale at ``value`` and the shift at 0."""
    probe = copy.deepcopy(module).eval()
    probe.get_parameter(path).fill_(value)
    for shift in _find(probe, SHIFT_NAMES, shape)[:1]:
        probe.get_parameter(shift).zero_()
    return probe(torch.ones(1, 2, *shape).cumsum(-1))


def _find(module: nn.Module, names: tuple[str, ...], shape: tuple[int, ...]) -> Paths:
    """Return every path of the Parameter that has the first of these names and the shape of a row."""
    size = math.prod(shape)
    paths_of: dict[nn.Parameter, Paths] = {}
    names_of: dict[nn.Parameter, set[str]] = {}  # the last parts of the paths
    for path, parameter in module.named_parameters(remove_duplicate=False):
        place, _, last = path.rpartition(".")
        owner = module.get_submodule(place)
        is_of_a_matrix = any(other.numel() > size for other in owner.parameters(recurse=False))
        if parameter.shape == shape and not is_of_a_matrix:
            paths_of.setdefault(parameter, []).append(path)
            names_of.setdefault(parameter, set()).add(last.lstrip("_"))
    for name in names:
        for parameter, paths in paths_of.items():
            if name in names_of[parameter]:
                return paths
    return []


def _keep_notes(
    module: nn.Module, shape: tuple[int, ...], lacking: list[str], keep: Collection[str]
) -> tuple[str, ...]:
    """Say in one line whether a scale and shift that the module cannot be given are kept or dropped."""
    if not lacking:
        return ()
    fates = []
    for what in lacking:
        fate = "applied to its output" if what in keep else "dropped"
        fates.append(f"the model's {what} is {fate}")
    lack = _lack(module, shape, lacking)
    return (f"{title(module)} has {lack}: {', '.join(fates)}",)


def _lack(module: nn.Module, shape: tuple[int, ...], lacking: list[str]) -> str:
    """Return "no scale and no shift", or why those that the module has cannot be the model's."""
    scale = _find(module, SCALE_NAMES, shape)
    shift = _find(module, SHIFT_NAMES, shape)
    if "scale" in lacking and scale:
        return f"no plain scale (it multiplies by more than {scale[0]}, as by 1 + {scale[0]})"
    if "scale" in lacking and shift:
        return "no scale, and a shift comes after the scale"
    names = f"no {' and no '.join(lacking)}"
    size = math.prod(shape)
    others = {path for path, parameter in module.named_parameters() if parameter.numel() == size}
    if others.difference(scale, shift):
        names += f" of a known name and of shape {shape}"
    return names


def eps_notes(module: nn.Module, eps: float, takes_eps: bool) -> tuple[str, ...]:
    """Say whether the module's eps differs from the model's."""
    others = [f"{value:g}" for value in other_eps(module, eps)]
    if None in _every_eps(module):  # torch.nn.RMSNorm then takes the smallest step of the dtype
        others.append("None")
    if others:
        return (f"eps is {', '.join(others)} in {title(module)}, where the model's is {eps:g}",)
    if takes_eps or eps_of(module):
        return ()
    return (f"eps cannot be set in {title(module)}",)


class OnePlusNorm(nn.LayerNorm):
    """A norm that multiplies by its weight, at a site whose Parameter ``weight`` is smaller by one.

    The checkpoint's Parameters are registered here, under their names. So a checkpoint, an optimizer and a tied module
    see what they saw before. Before each call the norm is given 1 + weight.

    Half precision rounds that sum by as much as an output. So an RMSNorm's is given in float32, as Gemma does it.
    A LayerNorm's stays in the weight's dtype, as in Nemotron's code.

    Subclasses nn.LayerNorm, since transformers' Trainer spares norms from weight decay by their class.

    Args:
        norm: has a ``weight`` of the shape of a row.
        weight: the checkpoint's, (C).
        eps: the site's.
        is_wide: whether the sum is in float32, at least.
    """

    def __init__(self, norm: Any, weight: nn.Parameter, eps: float, is_wide: bool) -> None:
        nn.Module.__init__(self)
        self.normalized_shape, self.eps, self.elementwise_affine = tuple(weight.shape), eps, True
        self.norm, self.is_wide = norm, is_wide
        self.register_parameter("weight", weight)
        self.register_parameter("bias", norm.bias)
        self.loans = [name for name in ("weight", "bias") if name in norm._parameters]
        for name in self.loans:
            del norm._parameters[name]
        self._lend(None, None)

    def forward(self, x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the norm's output for ``x`` (..., C), scaled by 1 + weight."""
        self._lend(self._sum(), self.bias)
        return self.norm(x).to(x.dtype)

    def plain(self) -> Any:
        """Return the norm with Parameters of its own: ``weight`` is the sum. This module must not be used after it."""
        for name in self.loans:
            self.norm.__dict__.pop(name)
        values = {"weight": self._sum(), "bias": self.bias}
        for name in self.loans:
            value = values[name]
            copied = None if value is None else nn.Parameter(value.detach().clone(), requires_grad=value.requires_grad)
            self.norm.register_parameter(name, copied)
        return self.norm

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without what is lent, since a tensor that autograd made cannot be copied."""
        self._lend(None, None)
        return self.__dict__.copy()

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, 1 + weight"

    def _sum(self) -> Tensor:
        """Return 1 + weight (C)."""
        weight: Tensor = self.weight
        if self.is_wide:
            weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
        return weight + 1

    def _lend(self, weight: Tensor | None, bias: Tensor | None) -> None:
        """Give the norm a weight and a bias. They are not registered there, or a checkpoint would have them twice."""
        lent = {"weight": weight, "bias": bias}
        for name in self.loans:
            self.norm.__dict__[name] = lent[name]
        if weight is None and isinstance(self.norm, AdaptedNorm):
            self.norm.lend()


def inner_norm(module: nn.Module) -> nn.Module:
    """Return the norm that a ``OnePlusNorm`` holds, or the module itself."""
    return module.norm if isinstance(module, OnePlusNorm) else module


def plain_norm(module: nn.Module) -> nn.Module:
    """Return the norm that a ``OnePlusNorm`` holds with Parameters of its own, or the module itself."""
    return module.plain() if isinstance(module, OnePlusNorm) else module
