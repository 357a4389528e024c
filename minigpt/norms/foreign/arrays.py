"""Make a norm of a function of arrays: NumPy's, JAX's, PyTorch's, or another package's.

The function is ``norm(x, weight, bias, eps)``. An attribute says which package's arrays it takes::

    def norm(x, weight, bias, eps): ...

    norm.arrays = "jax"

The kit and the judge compute with PyTorch, so every call turns tensors into arrays and the result into a tensor.
``vjp(grad_y, x, weight, bias, eps)``, an attribute too, gives the gradients of x, weight and bias. Without it the norm
runs forward only.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from minigpt.errors import NormError
from minigpt.norms.foreign.adapt import SCALE_NAMES, SHIFT_NAMES
from minigpt.norms.foreign.construct import EPS_NAME, naming, title
from minigpt.norms.foreign.locate import locate
from minigpt.norms.foreign.packages import NotSupported, Package, package_of

VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
UNNAMED = (*VARIABLE, inspect.Parameter.KEYWORD_ONLY)  # kinds of a parameter that x cannot be
WRITABLE = ("numpy", "torch")  # packages whose arrays a function can write into, on the tensor's own memory
TENSORS = ("x", "weight", "bias")  # the roles that get a gradient


class ArrayFunction:
    """A function of arrays, and which package's arrays it takes.

    Args:
        norm: the function, or its name as ``locate`` takes it.
        arrays: the package; None for what the function's attribute ``arrays`` says.

    Attributes:
        roles: of "x", "weight", "bias" and "eps" those that it takes, with its own names for them, in its order.
        vjp: the function that gives gradients; None without one.
        writes: "weight" and "bias", if a call has written into them. It gets copies, so the model keeps its own.

    Raises:
        NormError: if it is no function, if its parameters are not a norm's, or if there is no such package.
    """

    def __init__(self, norm: str | Callable[..., Any], arrays: str | None = None) -> None:
        self.norm, self.func = norm, made(norm)
        self.__qualname__ = norm if isinstance(norm, str) else title(norm)
        if not _is_function(self.func):
            raise NormError(
                f"is for a function norm(x, weight, bias, eps), which {self.__qualname__} is not", argument="arrays"
            )
        self.package = self._own_package() if arrays is None else package_of(arrays)
        self.signature = inspect.signature(self.func)
        self.roles = _roles_of(self.func, self.signature)
        self.vjp: Callable[..., Any] | None = getattr(self.func, "vjp", None)
        self.writes = set[str]()
        # torch.compile would trace NumPy's functions as PyTorch's: another function
        untraced: Any = torch.compiler.disable(self._differentiable)
        self.differentiable: Callable[..., Tensor] = untraced

    def _own_package(self) -> Package:
        try:
            return package_of(arrays_of(self.func))
        except NormError as error:
            raise NormError(f"{self.__qualname__}.arrays {error.message}") from error

    def __deepcopy__(self, memo: dict[int, Any]) -> "ArrayFunction":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return ArrayFunction, (self.norm, self.package.name)

    @property
    def has_gradients(self) -> bool:
        """True if gradients pass through it."""
        return self.vjp is not None or self.package.name == "torch"

    def output(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        """Return the function's result for ``x`` (..., C), ``weight`` (C,) and ``bias`` (C,).

        Raises:
            NotSupported: if the package has no arrays of a dtype.
            NormError: if it raises, or does not return one array in the shape of ``x``.
        """
        call = self._bound(x, weight, bias, eps)
        with naming(self):
            array = self.func(*call.args, **call.kwargs)
        y = self._tensor(array, "", x)
        if self.package.name in WRITABLE and not torch.compiler.is_compiling():
            for role, value in (("weight", weight), ("bias", bias)):
                after = call.arguments.get(self.roles.get(role, ""))
                if after is None or value is None:
                    continue
                if not torch.equal(self.package.to_tensor(after).to(value.device), value):
                    self.writes.add(role)
        return y

    def _differentiable(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        """Return ``output``, through which gradients pass if there is a ``vjp``."""
        return Call.apply(self, eps, x, weight, bias)  # pyright: ignore[reportReturnType]

    def gradients(
        self, dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> dict[str, Tensor]:
        """Return the gradients of x, weight and bias, of those that the function takes, for an incoming ``dy``.

        Raises:
            NotSupported: if the function has no ``vjp``.
            NormError: if ``vjp`` raises, or does not return an array for each of them, in its shape.
        """
        if self.vjp is None:
            raise NotSupported(f"{title(self)} gives no gradients: it has no attribute vjp")
        call = self._bound(x, weight, bias, eps)
        with naming(self, f"vjp of {title(self)}"):
            arrays = self.vjp(self.package.to_array(dy), *call.args, **call.kwargs)
        roles = [role for role, name in self.roles.items() if role in TENSORS and name in call.arguments]
        if not isinstance(arrays, tuple | list):
            raise NormError(f"vjp of {title(self)} must return a tuple, got a {type(arrays).__name__}")
        if len(arrays) != len(roles):
            raise NormError(f"vjp of {title(self)} must return {len(roles)} gradients, got {len(arrays)}")
        gradients = {}
        for role, array in zip(roles, arrays, strict=True):
            like = x if role == "x" else x.new_empty(x.shape[-1])
            gradients[role] = self._tensor(array, f"the gradient of {role} of ", like)
        return gradients

    def _bound(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> inspect.BoundArguments:
        """Return the arguments of a call as arrays.

        A scale or shift that the model lacks is left out where the function has a default for it, else it is neutral.
        """
        values: dict[str, Any] = {"x": x, "weight": weight, "bias": bias, "eps": eps}
        neutral = {"weight": torch.ones, "bias": torch.zeros}
        arguments: OrderedDict[str, Any] = OrderedDict()
        for role, name in self.roles.items():
            value = values[role]
            if value is None and _has_default(self.signature.parameters[name]):
                continue
            if value is None:
                value = neutral[role](x.shape[-1], dtype=x.dtype, device=x.device)
            elif role in ("weight", "bias"):
                value = value.clone()  # the function may write into it
            if role != "eps":
                value = self.package.to_array(value)
            arguments[name] = value
        return inspect.BoundArguments(self.signature, arguments)

    def _tensor(self, array: Any, what: str, like: Tensor) -> Tensor:
        """Return an array as a tensor on the device of ``like``, whose shape it must have."""
        name, place = what + title(self), _definition_of(self.func)
        if not self.package.is_array(array):
            kind = type(array).__name__
            raise NormError(f"{name} must be one array of {self.package.name}, got a {kind}{place}")
        with naming(self, name):  # a lazy package computes it here
            tensor = self.package.to_tensor(array).to(like.device)
        if tensor.shape != like.shape:
            got = tuple(tensor.shape)
            raise NormError(f"{name} must have the shape {tuple(like.shape)}, got {got}{place}")
        return tensor


def made(norm: Any) -> Any:
    """Return the class or function of a norm that ``norms.build`` takes."""
    return locate(norm) if isinstance(norm, str) else norm


def arrays_of(made: object) -> str | None:
    """Return which package's arrays a function takes, as its attribute ``arrays`` says; None without one."""
    if isinstance(made, ArrayFunction):
        return made.package.name
    if not _is_function(made):
        return None
    inner = getattr(made, "func", None)  # of a partial
    return getattr(made, "arrays", getattr(inner, "arrays", None))


def array_function(make: Any) -> ArrayFunction | None:
    """Return ``make`` as a function of arrays if it says that it is one, else None.

    Raises:
        NormError: if it looks like one, and does not say which package's arrays it takes.
    """
    if isinstance(make, ArrayFunction):
        return make
    if arrays_of(make) is not None:
        return ArrayFunction(make)
    if _is_function(make) and _takes_rows(make):
        raise NormError(
            f"{title(make)} is a function of arrays, and not one that makes a module: say which arrays it takes, by "
            f'minigpt norms --arrays numpy, torch, jax, ..., or by an attribute, {title(make)}.arrays = "numpy"'
        )
    return None


def lacks_gradients(module: object) -> bool:
    """Return True for a norm in a model through which no gradient passes: a function of arrays without ``vjp``."""
    return isinstance(module, ArrayNorm) and not module.function.has_gradients


def require_gradients(norm: Any) -> None:
    """Check that a norm that is a function of arrays has gradients, as training needs.

    Args:
        norm: what ``norms.build`` takes.

    Raises:
        NormError: if it has none.
    """
    function = array_function(made(norm))
    if function is not None and not function.has_gradients:
        raise NormError(f"{title(function)} cannot be trained: it gives no gradients, since it has no attribute vjp")


class ArrayNorm(nn.LayerNorm):
    """A function of arrays as a module. It has a ``weight`` and a ``bias`` if the function takes them.

    Subclasses nn.LayerNorm, since transformers' Trainer spares norms from weight decay by their class.

    Args:
        function: the function.
        shape: the trailing dimensions that are one row; the function gets them as one.
        eps: passed on if the function takes one.
        bias: whether the model has a shift.
    """

    def __init__(self, function: ArrayFunction, shape: tuple[int, ...], *, eps: float, bias: bool) -> None:
        nn.Module.__init__(self)
        self.normalized_shape, self.elementwise_affine = shape, True
        self.function = self.minigpt_function = function  # which messages name
        self.epsilon_of_model = eps
        if self.takes_eps:
            self.eps = eps
        if hasattr(function.func, "exact"):
            self.exact = function.func.exact
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        if "weight" in function.roles:
            self.weight = nn.Parameter(torch.ones(shape))
        if bias and "bias" in function.roles:
            self.bias = nn.Parameter(torch.zeros(shape))

    @property
    def remarks(self) -> tuple[str, ...]:
        """A sentence on each Parameter that a call has written into."""
        return tuple(f"it writes into its {role}, of which it gets a copy" for role in sorted(self.function.writes))

    @property
    def takes_eps(self) -> bool:
        """True if the function takes an eps."""
        return "eps" in self.function.roles

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the function's result for ``x`` (..., *normalized_shape)."""
        rows = x.flatten(-len(self.normalized_shape))  # (..., C)
        call = self.function.differentiable
        if self.function.package.name == "torch":
            call = self.function.output
        return call(rows, _flat(self.weight), _flat(self.bias), self.epsilon_of_model).view(x.shape)

    def extra_repr(self) -> str:
        return f"{title(self.function)}, {self.normalized_shape}, arrays of {self.function.package.name}"


class Call(torch.autograd.Function):
    """A call of a function of arrays, whose gradients come from its ``vjp``."""

    @staticmethod
    def forward(
        ctx: Any, function: ArrayFunction, eps: float, x: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        ctx.function, ctx.eps = function, eps
        ctx.save_for_backward(x, weight, bias)
        return function.output(x, weight, bias, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, bias = ctx.saved_tensors
        gradients = ctx.function.gradients(dy, x, weight, bias, ctx.eps)
        if weight is None:  # the function got a neutral one
            gradients["weight"] = None
        if bias is None:
            gradients["bias"] = None
        return None, None, gradients["x"], gradients.get("weight"), gradients.get("bias")


def _is_function(made: object) -> bool:
    return callable(made) and not isinstance(made, type | nn.Module)


def _takes_rows(make: Callable[..., Any]) -> bool:
    """Return True for a function that requires a scale behind its first argument, which no constructor does."""
    try:
        _, *others = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # it has no signature, or no parameter
        return False
    return any(_bare_name(one.name) in SCALE_NAMES and not _has_default(one) for one in others)


def _bare_name(name: str) -> str:
    return name.lower().strip("_")


def _has_default(parameter: inspect.Parameter) -> bool:
    return parameter.default is not inspect.Parameter.empty


def _flat(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.flatten()


def _roles_of(function: Callable[..., Any], signature: inspect.Signature) -> OrderedDict[str, str]:
    """Return a function's own names for x, weight, bias and eps, by role, in its order.

    Raises:
        NormError: if it requires something else, or does not name its first parameter.
    """
    parameters = list(signature.parameters.values())
    if not parameters or parameters[0].kind in UNNAMED:
        raise NormError(f"{title(function)} must take x, and weight, bias and eps by name, got {signature}")
    others = {}
    chosen = function.keywords if isinstance(function, partial) else {}
    for one in parameters[1:]:
        if one.name not in chosen and one.kind not in VARIABLE:
            others[_bare_name(one.name)] = one
    role_of = {name: "eps" for name in others if EPS_NAME.fullmatch(name)}
    for role, names in (("weight", SCALE_NAMES), ("bias", SHIFT_NAMES)):
        known = [name for name in names if name in others]
        if known:
            role_of[known[0]] = role
    roles = OrderedDict(x=parameters[0].name)
    for name, one in others.items():
        if name in role_of:
            roles[role_of[name]] = one.name
        elif not _has_default(one):
            raise NormError(
                f"{title(function)} must take x, and weight, bias and eps by name, and also requires {one.name!r}"
            )
    return roles


def _definition_of(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" ({code.co_filename}, line {code.co_firstlineno})" if code else ""
