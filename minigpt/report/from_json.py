"""Objects of what a JSON file holds, by the types of their fields, and back."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from enum import EnumType
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch

from minigpt.precision import DTYPES, dtype_name

hints_of = functools.cache(get_type_hints)
MADE_OF_WORDS = {Path: Path, torch.device: torch.device, torch.dtype: DTYPES.__getitem__}


def plain_type(value: Any) -> Any:
    """Return a dataclass, a path, a device or a dtype in types that ``json.dumps`` knows."""
    if dataclasses.is_dataclass(value):
        return vars(value)
    return dtype_name(value) if isinstance(value, torch.dtype) else str(value)


def from_json(kind: Any, value: Any) -> Any:
    """Return the object of a type that a JSON value describes; a number that is null is NaN.

    Args:
        kind: a dataclass, an enum, a list, a tuple or a dict of types, a type or None, a path, a device, a dtype, or a
            type of JSON itself.

    Raises:
        ValueError: if a value has another form; the message names the class and its fields.
    """
    if kind is Any:
        return value
    if kind is float and (value is None or type(value) is int):
        return math.nan if value is None else float(value)
    origin, members = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if value is None else from_json(some_type(kind), value)
    if dataclasses.is_dataclass(kind):
        return fields_from_json(kind, value)
    if isinstance(kind, EnumType):
        return kind(value)
    form = str if kind in MADE_OF_WORDS else {Sequence: list, tuple: list}.get(origin, origin or kind)
    if not isinstance(value, form) or (form is int and type(value) is bool):
        raise ValueError(f"it has {value!r:.50} in the place of {form.__name__}")
    if origin is dict:
        return {name: from_json(members[1], item) for name, item in value.items()}
    if origin is not None:
        items = [from_json(members[0], item) for item in value]
        return tuple(items) if origin is tuple else items
    return MADE_OF_WORDS[kind](value) if kind in MADE_OF_WORDS else value


def some_type(kind: Any) -> Any:
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
