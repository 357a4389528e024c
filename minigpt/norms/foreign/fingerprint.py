"""Describe the code and the values behind a norm, so that two norms of one name are told apart.

A file's digest does not do that: a ``functools.partial`` has other arguments, two lambdas stand in one file, and a
class of a notebook has no file.
"""

import functools
import hashlib
import sys
import sysconfig
from collections.abc import Callable, Mapping
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
        norm: what ``norms.build`` takes, or a module that stands in a model.
    """
    return _Description().of(norm)


class _Description:
    """Describes objects. Each is described once; a second meeting has its number alone."""

    def __init__(self) -> None:
        self.met: dict[int, int] = {}
        self.kept: list[object] = []  # so that no other object gets the same id

    def of(self, thing: Any) -> Any:
        if isinstance(thing, PLAIN):
            return f"{type(thing).__name__} {thing!r}"
        if id(thing) in self.met:
            return ["met", self.met[id(thing)]]
        self.met[id(thing)] = len(self.met)
        self.kept.append(thing)
        if isinstance(thing, functools.partial):
            return ["partial", self.of(thing.func), self.of(thing.args), self.of(thing.keywords)]
        if isinstance(thing, FunctionType):
            return self._function(thing)
        if isinstance(thing, CodeType):
            return self._code(thing)
        if isinstance(thing, MethodType):
            return ["method", self.of(thing.__func__), self.of(thing.__self__)]
        if isinstance(thing, staticmethod | classmethod):
            return self.of(thing.__func__)
        if isinstance(thing, property):
            return ["property", *(self.of(function) for function in (thing.fget, thing.fset, thing.fdel))]
        if isinstance(thing, type):
            return self._class(thing)
        return self._value(thing)

    def _value(self, thing: Any) -> Any:
        if isinstance(thing, ModuleType | BuiltinFunctionType):
            return f"{getattr(thing, '__module__', '')} {thing.__name__}"
        if isinstance(thing, Tensor):
            data = thing.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            return [str(thing.dtype), list(thing.shape), hashlib.sha256(data).hexdigest()]
        if isinstance(thing, Mapping):
            return ["map", [[self.of(key), self.of(value)] for key, value in thing.items()]]
        if isinstance(thing, list | tuple):
            return ["list", [self.of(item) for item in thing]]
        if isinstance(thing, set | frozenset):
            return ["set", sorted(map(repr, thing))]
        if isinstance(thing, nn.Module):
            return self._module(thing)
        if callable(thing) and hasattr(thing, "__dict__"):
            return ["object", self.of(type(thing)), self.of(vars(thing))]
        return repr(thing)

    def _module(self, module: nn.Module) -> Any:
        """Describe a module by its class and its attributes, without its tensors, and by its parts."""
        own = {name: value for name, value in vars(module).items() if name not in STATE and isinstance(value, PLAIN)}
        return ["module", self.of(type(module)), self.of(own), self.of(dict(module.named_children()))]

    def _function(self, function: FunctionType) -> Any:
        if _is_installed(function):
            return f"{function.__module__}:{function.__qualname__}"
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        defaults = [function.__defaults__, function.__kwdefaults__]
        return ["function", self._code(function.__code__, function.__globals__), self.of(cells), self.of(defaults)]

    def _code(self, code: CodeType, names: Mapping[str, Any] | None = None) -> Any:
        """Describe code: its instructions, its constants, and the values of the global names that it uses."""
        constants = [self._code(one, names) if isinstance(one, CodeType) else self.of(one) for one in code.co_consts]
        used = {name: names[name] for name in code.co_names if names and name in names}
        return ["code", hashlib.sha256(code.co_code).hexdigest(), code.co_names, constants, self.of(used)]

    def _class(self, cls: type) -> Any:
        if _is_installed(cls):
            return f"{cls.__module__}:{cls.__qualname__}"
        members = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
        return ["class", cls.__qualname__, self.of(cls.__bases__), self.of(members)]


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
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and file.startswith(INSTALLED)
