"""The type checker of the test run: tensors against the shapes and dtypes in signatures, and nothing else.

A plain ``int`` or ``str`` is not checked. What a caller gives in its place is for the project to refuse, in a sentence
of its own; a checker that speaks first would hide whether it does.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_args

import jaxtyping
from beartype.door import is_bearable
from jaxtyping import AbstractArray, jaxtyped


def install() -> None:
    """Check every function of minigpt that is imported from now on.

    jaxtyping's hook decorates them all. Its own decorator would look at arguments twice, and bind those of functions
    without any shape: as long as the tests themselves take.
    """
    jaxtyping.jaxtyped = checked
    jaxtyping.install_import_hook("minigpt", None)


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
