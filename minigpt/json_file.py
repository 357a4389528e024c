"""JSON that came from somewhere: of a bounded size, every name in it once, and one sentence where it is not.

And JSON that is to go somewhere, which has no word for infinity.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minigpt.errors import MiniGPTError

MOST_BYTES = 4 * 2**20  # a GPT-2 XL's own are below 0.1 MB; as Python objects JSON takes twenty times its size


def read_object(path: Path, kind: type[MiniGPTError], most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        MiniGPTError: of the given kind; the file cannot be read, is too large, no JSON, no object, or names one thing
            twice.
    """
    try:
        size = path.stat().st_size
        if size > most_bytes:
            raise kind(f"{path} is {size:,} bytes long; more than {most_bytes:,} are not read")
        data = path.read_bytes()
    except OSError as error:
        raise kind(f"cannot read {path}: {error.strerror}") from error
    try:
        return parse_object(data)
    except ValueError as error:
        raise kind(f"{path} is not valid JSON: {error}") from error
    except TypeError as error:
        raise kind(f"{path} {error}") from error


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object that the bytes spell.

    Raises:
        ValueError: they are no JSON, or a name stands twice in one object.
        TypeError: they are JSON, but no object.
    """
    try:
        fields = json.loads(data.decode("utf-8"), object_pairs_hook=_each_name_once)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(fields, dict):
        raise TypeError(f"holds a JSON {type(fields).__name__}, not the object that it must be")
    return fields


def finite(value: Any, instead: Callable[[float], Any] = lambda number: None) -> Any:
    """The value, in which every number that is not finite is None, or whatever stands ``instead`` of it."""
    if isinstance(value, dict):
        return {key: finite(item, instead) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item, instead) for item in value]
    return instead(value) if isinstance(value, float) and not math.isfinite(value) else value


def _each_name_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"the name {name[:96]!r} stands in it twice")
        fields[name] = value
    return fields
