"""Find the class that a name stands for: registered, in a package, or in a file."""

import difflib
import functools
import hashlib
import importlib
import importlib.util
import linecache
import os.path
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from minigpt.errors import RAISED, NormError, listing
from minigpt.norms.registry import lookup


def locate(norm: str) -> Callable[..., Any]:
    """Return the class or function that a registered name, "package.module:Name" or "path/to/file.py:Name" stands for.

    A file is imported once for each content, so an edited file is read again.

    Raises:
        NormError: if the name is unknown, the file or module is not there or does not import, or has no such class.
    """
    if ":" not in norm and not _is_file(norm):
        return lookup(norm).cls
    place, _, name = norm.rpartition(":") if ":" in norm else (norm, "", "")
    file = file_of(norm)
    if file is None and not all(part.isidentifier() for part in place.split(".")):
        raise NormError(f"{norm!r} names no norm; write package.module:Name or path/to/file.py:Name")
    module = _from_package(place) if file is None else _from_file(file)
    found: Any = module
    try:
        for part in name.split("."):
            found = getattr(found, part, None)
    except RAISED as error:  # a module may have a __getattr__ of its own
        raise NormError(f"asked for {name!r}, {place} raised {last_line(error)}") from error
    if not callable(found):
        wrong = f"{norm} is of type {type(found).__name__}, not a class"
        if found is None:
            wrong = f"{place} has no {name!r}" if name else f"{norm} names no class, as {place}:Name would"
        raise NormError(f"{wrong}; {_classes(module, place, name)}")
    return found


def file_of(norm: str) -> Path | None:
    """Return the file of "path/to/file.py:Name"; None for a name of another kind."""
    place = norm.rpartition(":")[0] or norm
    return Path(os.path.expanduser(place)) if _is_file(place) else None  # where there is no such user it stays


def last_line(error: BaseException, file: str | None = None) -> str:
    """Return the end of a traceback in one line: the error, and the file and line that it came from.

    Args:
        file: the file whose last line in the traceback is named, if it is there.
    """
    message = str(error).strip().partition("\n")[0]
    if isinstance(error, SyntaxError) and error.filename:
        message, place = error.msg, f"{error.filename}, line {error.lineno}"
    else:
        frames = traceback.extract_tb(error.__traceback__)
        frame = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])
        place = f"{frame.filename}, line {frame.lineno}"
    return f"{type(error).__name__}{': ' if message else ''}{message} ({place})"


def _is_file(place: str) -> bool:
    return place.endswith(".py") or "/" in place or "\\" in place


def _from_file(path: Path) -> ModuleType:
    try:
        source = path.read_bytes()
    except OSError as error:
        raise NormError(f"cannot read {path}: {error.strerror}") from error
    return _run(path.resolve(), source)


@functools.cache
def _run(path: Path, source: bytes) -> ModuleType:
    """Run the source as a module, under a name that no other file and no other version of this one has.

    The import system would trust cached bytecode by time stamp and size, so the source is compiled here.
    """
    name = f"{path.stem}_{hashlib.sha256(bytes(path) + b':' + source).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise NormError(f"{path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    linecache.checkcache(str(path))  # a kernel's compiler asks for the source of what it compiles
    sys.modules[name] = module
    folder = str(path.parent)
    sys.path.append(folder)  # its neighbours can be imported, as when it is run; at the end, so as to hide nothing
    try:
        exec(compile(source, path, "exec"), vars(module))
    except RAISED as error:
        del sys.modules[name]
        is_relative = isinstance(error, ImportError) and "relative import" in str(error)
        hint = "; name it as package.module:Name, with the folder of its package on PYTHONPATH" if is_relative else ""
        raise NormError(f"{path} does not import: {last_line(error, str(path))}{hint}") from error
    finally:
        sys.path.remove(folder)
    return module


def _from_package(place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name and f"{place}.".startswith(f"{error.name}."):
            hint = "a class in a file of your own is path/to/file.py:Name"
            raise NormError(f"there is no module {error.name!r} on Python's path; {hint}") from error
        raise NormError(f"{place} does not import: {last_line(error)}") from error
    except RAISED as error:
        raise NormError(f"{place!r} does not import: {last_line(error)}") from error


def _classes(module: ModuleType, place: str, wanted: str) -> str:
    """Return the names that may be meant: the most similar, or the module's own, or all that it has."""
    modules = {name: cls for name, cls in vars(module).items() if isinstance(cls, type) and issubclass(cls, nn.Module)}
    own = [name for name, cls in modules.items() if cls.__module__ == module.__name__]
    if not modules:
        return f"{place} has no torch.nn.Module at all"
    similar = ", ".join(difflib.get_close_matches(wanted, modules, n=3))
    return f"its torch.nn.Module classes are {similar or listing(own or modules)}"
