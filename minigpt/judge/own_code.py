"""The code that a reference computes with. It is a truth only as it lies in the files of transformers and PyTorch.

Kernel packages, and users, replace classes and functions of both for a whole process: a norm's class, a function of a
model's module, ``F.layer_norm``. A reference then computes what the candidate does.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

OWN = {"torch", "transformers"}
CALLED = {  # packages whose functions transformers' own files call
    "accelerate", "causal_conv1d", "einops", "fla", "flash_attn", "huggingface_hub", "kernels", "mamba_ssm", "mambapy",
    "natten", "numpy", "scipy", "timm", "torchaudio", "torchvision", "triton", "xlstm",
}  # fmt: skip
GENERAL = {"torch.nn.modules.module", "transformers.modeling_utils"}  # of classes that are bases of every model
CALL_METHODS = ("__call__", "forward")


def replaced_code(model: Any) -> list[str]:
    """Return the places in transformers and PyTorch at which other code stands than in their files.

    These are the methods of the model's parts, and what these and the functions that they call name. Of an
    architecture that another package has registered, that package's code is its own.
    """
    config = model.config
    search = _Search({_package(type(config).__module__)}, {*_words(config.to_dict()), config._attn_implementation})
    for path, part in model.named_modules():
        search.add_class(path, type(part))
        for name in ("forward", "_old_forward"):  # accelerate's hooks set these
            search.follow(f"{path}.{name}", vars(part).get(name))
    for name in search.names & vars(Tensor).keys():
        search.look_at("torch._tensor", f"Tensor.{name}", vars(Tensor)[name])
    return search.replaced


class _Search:
    """Follows functions to what they name.

    Args:
        packages: whose code is its own, beside PyTorch's and transformers'.
        words: of the model's config, which choose from tables of functions.

    Attributes:
        names: all that the functions name.
        replaced: places at which other code stands.
    """

    def __init__(self, packages: set[str], words: set[str]) -> None:
        self.own, self.words = OWN | packages, words
        self.names: set[str] = set()
        self.replaced: list[str] = []
        self.kinds: set[type] = set()
        self.seen: dict[int, Any] = {}  # what is kept keeps its id

    def add_class(self, path: str, part: type) -> None:
        """Look at the methods of a part's class: of a base that every model has, at its calls alone."""
        for kind in part.__mro__:
            if kind in self.kinds:
                continue
            self.kinds.add(kind)
            self.follow(f"the class of {path}", kind)
            is_general = kind.__module__ in GENERAL or not issubclass(kind, nn.Module)
            for name, method in vars(kind).items():
                if self._is_own(kind.__module__) and (name in CALL_METHODS or not is_general):
                    self.look_at(kind.__module__, f"{kind.__qualname__}.{name}", method)

    def look_at(self, module: str, name: str, thing: Any) -> None:
        """Follow what stands at a name of a module, which must be what the module's file defines there, if it does."""
        place = f"{module}.{name}"
        if not _is_defined_as(module, name, thing):
            self._found(place)
        self.follow(place, thing)

    def follow(self, place: str, thing: Any, *, is_kept: bool = False) -> None:
        """Follow a function to all that it names. It must lie in a file of a package that may stand there.

        Args:
            is_kept: whether a decorator keeps it, which may choose a kernel of any package.
        """
        if id(thing) in self.seen:
            return
        self.seen[id(thing)] = thing
        if isinstance(thing, Mapping):
            for word in self.words:
                chosen = thing.get(word)
                self.follow(f"{place}[{word!r}]", chosen[0] if isinstance(chosen, tuple) else chosen)
        elif isinstance(thing, type):
            self._require_known(place, thing.__module__)
        elif isinstance(thing, FunctionType):
            home = thing.__globals__["__name__"]
            if not self._is_own(home):
                if not is_kept:
                    self._require_known(place, home)
                return
            code, defined = thing.__code__, definitions(home)
            if defined and code not in defined.get(code.co_qualname, ()):
                self._found(place)
                return
            self._follow_names(home, thing)
        elif callable(thing):
            self._require_known(place, type(thing).__module__)
        for inner in _inside(thing):
            self.follow(place, inner)
        for inner in _kept(thing):
            self.follow(place, inner, is_kept=True)

    def _follow_names(self, home: str, function: FunctionType) -> None:
        """Look at what a function names: globals of its module, and of these modules what else it names.

        Deep inside PyTorch it is not followed.
        """
        names = _names(function.__code__)
        self.names |= names
        if _package(home) == "torch" and not home.startswith("torch.nn."):
            return
        modules = [(home, {name: function.__globals__[name] for name in names & function.__globals__.keys()})]
        known = {home}
        for module, things in modules:
            for name, thing in things.items():
                if not isinstance(thing, ModuleType):
                    self.look_at(module, name, thing)
                elif self._is_own(thing.__name__) and thing.__name__ not in known:
                    known.add(thing.__name__)
                    members = vars(thing)
                    modules.append((thing.__name__, {member: members[member] for member in names & members.keys()}))

    def _is_own(self, module: str) -> bool:
        return _package(module) in self.own

    def _require_known(self, place: str, module: str) -> None:
        """Keep a place whose code lies in a package that nobody but this process puts there."""
        if _package(module) not in self.own | CALLED | sys.stdlib_module_names:
            self._found(place)

    def _found(self, place: str) -> None:
        if place not in self.replaced:
            self.replaced.append(place)


@functools.cache
def definitions(module: str) -> dict[str, list[CodeType]]:
    """Return the code that a module's file has for its classes and functions, by their qualified names."""
    loader: Any = getattr(getattr(sys.modules.get(module), "__spec__", None), "loader", None)
    found: dict[str, list[CodeType]] = {}
    if not hasattr(loader, "get_code"):
        return found
    codes = [loader.get_code(module)]
    while codes:
        for constant in codes.pop().co_consts:
            if isinstance(constant, CodeType):
                found.setdefault(constant.co_qualname, []).append(constant)
                codes.append(constant)
    return found


def _is_defined_as(module: str, name: str, thing: Any) -> bool:
    """Return whether a thing is what the file of a module defines at a name, also where decorators have wrapped it."""
    codes = definitions(module).get(name)
    if not codes:  # it is imported, or computed
        return True
    if isinstance(thing, type):
        return (thing.__module__, thing.__qualname__) == (module, name)
    things, functions = [thing], list[FunctionType]()
    for thing in things:
        if isinstance(thing, FunctionType):
            functions.append(thing)
        things += [inner for inner in (*_inside(thing), *_kept(thing)) if inner not in things]
    return not functions or any(function.__code__ in codes for function in functions)


def _inside(thing: Any) -> list[Any]:
    """Return what a method, a property or another wrapper calls, and the class whose method it is."""
    if isinstance(thing, staticmethod | classmethod):
        return [thing.__func__]
    if isinstance(thing, MethodType):
        return [thing.__func__, *([thing.__self__] if isinstance(thing.__self__, type) else [])]
    if isinstance(thing, property):
        return [thing.fget]
    if isinstance(thing, functools.partial | functools.cached_property):
        return [thing.func]
    if callable(thing) and not isinstance(thing, type) and hasattr(thing, "__dict__"):
        return [vars(thing).get("__wrapped__")]
    return []


def _kept(thing: Any) -> list[FunctionType]:
    """Return the functions that a decorated function keeps."""
    kept: list[FunctionType] = []
    for cell in getattr(thing, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty one
            if isinstance(cell.cell_contents, FunctionType):
                kept.append(cell.cell_contents)
    return kept


def _names(code: CodeType) -> set[str]:
    """Return the globals and attributes that code names, and the code in it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names


def _words(value: Any) -> Iterator[str]:
    """Yield the strings in the fields of a config."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _words(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _words(part)


def _package(module: str) -> str:
    return module.partition(".")[0]
