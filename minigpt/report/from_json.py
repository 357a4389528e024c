"""Objects of what a JSON file holds, by the types of their fields."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from enum import EnumType
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

hints_of = functools.cache(get_type_hints)


def from_json(kind: Any, value: Any) -> Any:
    """Return the object of a type that a JSON value describes; a number that is null is NaN.

    Args:
        kind: a dataclass, an enum, a list of a type, a type or None, or a type of JSON itself.

    Raises:
        ValueError: if a value has another form; the message names the class and its fields.
    """
    if kind is float:
        return math.nan if value is None else value
    if isinstance(kind, UnionType):
        return None if value is None else from_json(some_type(kind), value)
    if dataclasses.is_dataclass(kind):
        return fields_from_json(kind, value)
    if isinstance(kind, EnumType):
        return kind(value)
    if get_origin(kind) in (list, Sequence):
        (member,) = get_args(kind)
        return [from_json(member, item) for item in value]
    return value


def some_type(kind: UnionType) -> Any:
    """Return the type of a value that is not None."""
    for one in get_args(kind):
        if one is not NoneType:
            return one
    return NoneType


def fields_from_json(kind: Any, value: Any) -> Any:
    """Return an object of a dataclass whose fields are the keys of a JSON object."""
    hints = hints_of(kind)
    names = {field.name for field in dataclasses.fields(kind)}
    if not isinstance(value, dict) or value.keys() != names:
        raise ValueError(f"{kind.__name__} has the fields {', '.join(sorted(names))}")
    fields: dict[str, Any] = {}
    for name, part in value.items():
        fields[name] = from_json(hints[name], part)
    return kind(**fields)
