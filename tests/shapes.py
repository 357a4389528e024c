"""The type checker of the test run: tensors against the shapes and dtypes in signatures, and nothing else.

A plain ``int`` or ``str`` is not checked. What a caller gives in its place is for the project to refuse, in a sentence
of its own; a checker that speaks first would hide whether it does.
"""

import dataclasses
import functools
import importlib.util
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import jaxtyping
from beartype.door import is_bearable
from jaxtyping import AbstractArray, jaxtyped


def install() -> None:
    """Check every function of minigpt that says a shape and is imported from now on.

    jaxtyping's hook decorates all functions of a module. Its own decorator would look at arguments twice, and bind
    those of functions without any shape: as long as the tests themselves take.
    """
    jaxtyping.jaxtyped = checked
    spec = importlib.util.find_spec("minigpt")
    assert spec is not None
    assert spec.origin is not None
    jaxtyping.install_import_hook(modules_with_shapes(Path(spec.origin).parent), None)


def modules_with_shapes(package: Path) -> list[str]:
    """The modules that name jaxtyping, or a shape that a module has given a name. The hook writes each anew."""
    sources = {file: file.read_text(encoding="utf-8") for file in package.rglob("*.py")}
    definitions = re.findall(r"^(\w+) = (.*)", "\n".join(sources.values()), re.MULTILINE)
    names = ["jaxtyping", r"(?:Float|Int|Bool)\["]
    size = 0
    while size != len(names):  # a name may stand for another name of a shape
        size = len(names)
        shape = re.compile(rf"\b(?:{'|'.join(names)})")
        names += [name for name, value in definitions if name not in names and shape.search(value)]
    shape = re.compile(rf"\b(?:{'|'.join(names)})")
    modules = []
    for file, source in sources.items():
        if shape.search(source):
            parts = file.relative_to(package.parent).with_suffix("").parts
            modules.append(".".join(part for part in parts if part != "__init__"))
    return modules


def checked(function: Any = None, *, typechecker: None = None) -> Any:
    """``function``, which checks those of its arguments and results whose annotations say a shape."""
    if function is None:
        return checked
    if inspect.isclass(function):
        if dataclasses.is_dataclass(function) and "__init__" in vars(function):
            function.__init__ = checked(function.__init__)
        return function
    hints = {name: hint for name, hint in function.__annotations__.items() if has_shape(hint)}
    return _checked(function, hints) if hints else function


def _checked(function: Callable[..., Any], hints: dict[str, Any]) -> Callable[..., Any]:
    assert not inspect.iscoroutinefunction(function), f"{function.__qualname__} returns its result later"
    parameters, returned = inspect.signature(function).parameters, hints.pop("return", object)
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, parameter in parameters.items() if parameter.kind in by_place]
    for name in hints:
        assert parameters[name].kind in (*by_place, inspect.Parameter.KEYWORD_ONLY), f"many are given as {name}"

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        if jaxtyping.config.jaxtyping_disable:
            return function(*args, **named)
        supplied = {**dict(zip(names, args, strict=False)), **named}
        with jaxtyped("context"):  # one size for one name, from the first argument to the result
            for name, hint in hints.items():
                if name in supplied:
                    require_shape(supplied[name], hint, f"{name} of {function.__qualname__}")
            result = function(*args, **named)
            require_shape(result, returned, f"the result of {function.__qualname__}")
        return result

    return call


def require_shape(value: Any, hint: Any, name: str) -> None:
    """Raise ``TypeError`` unless the value is what the hint says, with the sizes that names have stood for so far."""
    is_it = isinstance(value, hint) if isinstance(hint, type) else is_bearable(value, hint)
    if not is_it:
        shape = getattr(value, "shape", None)
        raise TypeError(f"{name} is no {hint}, but {type(value).__name__} {shape or value}")


def has_shape(hint: Any) -> bool:
    """Whether a hint is ``Float[Tensor, "batch seq"]`` or the like, or has one in it."""
    return (isinstance(hint, type) and issubclass(hint, AbstractArray)) or any(map(has_shape, get_args(hint)))
