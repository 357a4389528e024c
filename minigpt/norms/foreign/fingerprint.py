"""Describe the code and the values behind a norm, so that two norms of one name differ.

A file's digest does not do that: a ``functools.partial`` has other arguments, two lambdas are in one file, and a
class of a notebook has no file.
"""

import functools
import hashlib
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platlib", "purelib")})
OURS = __name__.partition(".")[0]
STATE = vars(nn.Module()).keys()  # of every module: its parts are described by themselves


def describe(norm: object) -> Any:
    """Return JSON types that change with the code of a norm and with the values that its code holds.

    Installed packages and this one are named, and not read. An object of an unknown kind is described by its ``repr``.

    Args:
        norm: what ``norms.build`` takes, or a module in a model.
    """
    return _Description().of(norm)


class _Description:
    """Describes objects. Each is described once; a second meeting has its number alone."""

    def __init__(self) -> None:
        self.met: dict[int, int] = {}
        self.kept: list[object] = []  # so that no other object gets the same id
        self.ways: dict[type, Callable[[Any], Any]] = {
            functools.partial: self._partial,
            FunctionType: self._function,
            MethodType: lambda method: [self.of(method.__func__), self.of(method.__self__)],
            staticmethod: lambda method: self.of(method.__func__),
            classmethod: lambda method: self.of(method.__func__),
            property: self._property,
            type: self._class,
            ModuleType: lambda module: module.__name__,
            BuiltinFunctionType: _name,
            Tensor: self._tensor,
            nn.Module: self._module,
            Mapping: self._mapping,
            list: self._sequence,
            tuple: self._sequence,
            set: lambda items: sorted(map(repr, items)),
            frozenset: lambda items: sorted(map(repr, items)),
        }

    def of(self, thing: Any) -> Any:
        if isinstance(thing, PLAIN):
            return f"{type(thing).__name__} {thing!r}"
        if id(thing) in self.met:
            return ["met", self.met[id(thing)]]
        self.met[id(thing)] = len(self.met)
        self.kept.append(thing)
        for kind, way in self.ways.items():
            if isinstance(thing, kind):
                return [kind.__name__, way(thing)]
        if callable(thing) and hasattr(thing, "__dict__"):
            return ["object", self.of(type(thing)), self.of(vars(thing))]
        return repr(thing)

    def _partial(self, partial: functools.partial[Any]) -> Any:
        return [self.of(partial.func), self.of(partial.args), self.of(partial.keywords)]

    def _function(self, function: FunctionType) -> Any:
        if _is_installed(function):
            return _name(function)
        cells = []
        for cell in function.__closure__ or ():
            cells.append(self.of(cell.cell_contents) if _is_filled(cell) else None)
        defaults = [function.__defaults__, function.__kwdefaults__]
        return [self._code(function.__code__, function.__globals__), cells, self.of(defaults)]

    def _code(self, code: CodeType, values: Mapping[str, Any]) -> Any:
        """Describe code: its instructions, its constants, and the values of the global names that it uses."""
        constants = []
        for constant in code.co_consts:
            is_code = isinstance(constant, CodeType)
            constants.append(self._code(constant, values) if is_code else self.of(constant))
        used = []
        for name in code.co_names:
            used.append([name, self.of(values.get(name))])
        return [_digest(code.co_code), constants, used]

    def _property(self, thing: property) -> Any:
        return [self.of(thing.fget), self.of(thing.fset), self.of(thing.fdel)]

    def _class(self, cls: type) -> Any:
        if _is_installed(cls):
            return _name(cls)
        members = dict(vars(cls))
        for slot in ("__dict__", "__weakref__"):  # their repr has an address
            members.pop(slot, None)
        return [cls.__qualname__, self.of(cls.__bases__), self.of(members)]

    def _module(self, module: nn.Module) -> Any:
        """Describe a module by its class and its attributes, without its tensors, and by its parts."""
        own = {}
        for name, value in vars(module).items():
            if name not in STATE and isinstance(value, PLAIN):
                own[name] = value
        return [self.of(type(module)), self.of(own), self.of(dict(module.named_children()))]

    def _tensor(self, tensor: Tensor) -> Any:
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return [str(tensor.dtype), list(tensor.shape), _digest(data.numpy().tobytes())]

    def _mapping(self, mapping: Mapping[Any, Any]) -> Any:
        pairs = []
        for key, value in mapping.items():
            pairs.append([self.of(key), self.of(value)])
        return pairs

    def _sequence(self, items: Sequence[Any]) -> Any:
        return list(map(self.of, items))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _name(thing: Any) -> str:
    return f"{thing.__module__}:{thing.__qualname__}"


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # a name that has no value yet
        return False
    return True


def _is_installed(thing: Callable[..., Any]) -> bool:
    """Return True for a class or function of this package, of Python, or of an installed package."""
    module = thing.__module__ or ""
    if module.partition(".")[0] in (OURS, "builtins"):
        return True
    if module == "__main__":  # its file is that of a program, e.g. of pytest, which runs code that is in no file
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and file.startswith(INSTALLED)
