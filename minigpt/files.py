"""Read text and JSON from files, with one sentence if that fails. Write numbers that JSON has no word for as null."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minigpt.errors import MiniGPTError


def read_object(path: Path, kind: type[MiniGPTError]) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        MiniGPTError: of the given kind, if the file cannot be read or does not contain a JSON object.
    """
    try:
        return parse_object(path.read_bytes())
    except OSError as error:
        raise kind(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise kind(f"{path} is not a JSON object: {error}") from error


def parse_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object in the bytes.

    Raises:
        ValueError: if they are not JSON.
        TypeError: if they are JSON, but not an object.
    """
    fields = json.loads(data)
    if not isinstance(fields, dict):
        raise TypeError(f"it is a {type(fields).__name__}")
    return fields


def finite(value: Any, instead: Callable[[float], Any] = lambda number: None) -> Any:
    """Return the value with every number that is not finite replaced by ``instead`` of it, by default None."""
    if isinstance(value, dict):
        return {key: finite(item, instead) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item, instead) for item in value]
    return instead(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_text(file: Path, kind: type[MiniGPTError] = MiniGPTError) -> str:
    """Return the text of a file with its line ends as they are, without a byte order mark.

    Raises:
        MiniGPTError: of the given kind, if the file cannot be read or is not UTF-8 text.
    """
    try:
        return file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise kind(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise kind(not_utf8(file, error)) from error


def not_utf8(what: object, error: UnicodeDecodeError) -> str:
    """Return the sentence that says where a text is not UTF-8, and how to make it so."""
    byte = error.object[error.start]
    return (
        f"{what} is not UTF-8 text: byte 0x{byte:02x} at {error.start:,}; convert it first, e.g. Latin-1 with "
        "iconv -f LATIN1 -t UTF-8"
    )
