"""The type checker of the test run: tensors against the shapes and dtypes in signatures, and nothing else.

A plain ``int`` or ``str`` is not checked. What a caller gives in its place is for the project to refuse, in a sentence
of its own; a checker that speaks first would hide whether it does.
"""

from collections.abc import Callable
from typing import Any, get_args

import beartype
from jaxtyping import AbstractArray


def tensors_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which checks those of its arguments and results whose annotations say a shape."""
    function.__annotations__ = {name: hint for name, hint in function.__annotations__.items() if has_shape(hint)}
    return beartype.beartype(function) if function.__annotations__ else function


def has_shape(hint: Any) -> bool:
    """Whether a hint is ``Float[Tensor, "batch seq"]`` or the like, or has one in it."""
    return (isinstance(hint, type) and issubclass(hint, AbstractArray)) or any(map(has_shape, get_args(hint)))
