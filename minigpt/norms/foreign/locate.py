"""Find the class of a name: a registered norm, or a class in a package or a file."""

import difflib
import functools
import hashlib
import importlib
import inspect
import linecache
import os.path
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from minigpt.errors import NormError, listing, raised
from minigpt.norms.registry import is_registered, lookup
from minigpt.watch import watched

IMPORTS, WORDS = re.compile(r"^\s*(?:from|import)\b.*", re.MULTILINE), re.compile(r"\w+")
OURS = str(Path(__file__).parents[2])
FUNCTION = "minigpt_function"  # attribute of what is put around a function: messages name the function


def locate(norm: str) -> Callable[..., Any]:
    """Return the class or function of a registered name, "package.module:Name" or "path/to/file.py:Name".

    A file is imported once for each content, so an edited file is read again.

    Raises:
        NormError: if the name is unknown, the file or module is not there or does not import, or has no such class.
    """
    file = file_of(norm)
    if file is None and (":" not in norm or is_registered(norm)):
        return lookup(norm)
    place, name = norm, ""
    if ":" in norm:
        place, _, name = norm.rpartition(":")
    if file is not None:
        module = _from_file(file)
    elif is_registered(place):
        raise NormError(f"the norm {place} takes no number, got {norm!r}")
    else:
        module = _from_package(place)
    member: Any = module
    for part in name.split("."):
        member = getattr(member, part, None)
    if callable(member):
        return member
    missing = f"give a class as {place}:Name"
    if name:
        missing = f"{place} has no class {name!r}"
    raise NormError(f"{missing}; its torch.nn.Module classes are {_classes_like(name, module)}")


def _classes_like(name: str, module: ModuleType) -> str:
    """List a module's classes of torch modules for a message: those named nearly so, else those written there."""
    classes = []
    written_there = []
    for known, cls in vars(module).items():
        if isinstance(cls, type) and issubclass(cls, nn.Module):
            classes.append(known)
            if cls.__module__ == module.__name__:
                written_there.append(known)
    near = difflib.get_close_matches(name, classes)
    return listing(near or written_there or classes) or "none"


def file_of(norm: str) -> Path | None:
    """Return the file of "path/to/file.py:Name"; None for a name of another kind."""
    place = norm.rpartition(":")[0] or norm
    is_file = place.endswith(".py") or "/" in place or "\\" in place
    if not is_file:
        return None
    return Path(os.path.expanduser(place))  # "~" of an unknown user stays as it is


def code_files(norm: Any) -> list[Path]:
    """Return the file that a norm's class is written in, then the files in its folder that it imports.

    An installed package is not searched, since its version names it.
    """
    file = None
    make = norm
    if isinstance(norm, str):
        file = file_of(norm)
    if file is None:
        if isinstance(norm, str):
            make = locate(norm)
        written = source_file(make)
        if written is None or not Path(written).is_file():
            return []
        file = Path(written)
        if "site-packages" in file.parts or written.startswith(OURS):
            return [file]
    files: list[Path] = []
    waiting = [file]
    while waiting:
        file = waiting.pop()
        if file not in files:
            files.append(file)
            waiting += _imported_files(file)
    return files


def _imported_files(file: Path) -> list[Path]:
    """Return the files in the folder of a file, or of its package, that an import in it may read."""
    names: set[str] = set()
    for line in IMPORTS.findall(file.read_text(errors="replace")):
        names.update(WORDS.findall(line))
    folders = [file.parent]
    if (file.parent / "__init__.py").is_file():
        folders.append(file.parent.parent)
    paths = []
    for folder in folders:
        for name in sorted(names):
            paths += [folder / f"{name}.py", *(folder / name).glob("*.py")]
    return [path for path in paths if path.is_file()]


def source_file(make: object) -> str | None:
    """Return the file that a class, function or module is written in; None if there is none."""
    make = getattr(make, FUNCTION, make)
    written: Any = getattr(make, "func", make)
    if isinstance(make, nn.Module):
        written = type(make)
    try:
        return inspect.getsourcefile(inspect.unwrap(written))
    except (TypeError, OSError):  # written in a session
        return None


def last_line(error: BaseException, file: str | None = None) -> str:
    """Return the end of a traceback in one line: the error, and the file and line that it came from.

    Args:
        file: the file whose last line in the traceback is named, if it is there; else it is the last line outside
            installed packages.
    """
    message = str(error).strip().partition("\n")[0]
    if isinstance(error, SyntaxError) and error.filename:
        message = error.msg
        place = f"{error.filename}, line {error.lineno}"
    else:
        frame = _relevant_frame(traceback.extract_tb(error.__traceback__), file)
        place = f"{frame.filename}, line {frame.lineno}"
    kind = type(error).__name__
    if message:
        kind += ": "
    return f"{kind}{message} ({place})"


def _relevant_frame(frames: Sequence[traceback.FrameSummary], file: str | None) -> traceback.FrameSummary:
    """Return the last frame in the file, else the last outside installed packages and this one, else the last."""
    in_file = []
    outside = []
    for frame in frames:
        if frame.filename == file:
            in_file.append(frame)
        if "site-packages" not in frame.filename and not frame.filename.startswith(OURS):
            outside.append(frame)
    return (in_file or outside or frames)[-1]


def _from_file(path: Path) -> ModuleType:
    try:
        source = path.read_bytes()
    except OSError as error:
        raise NormError(f"cannot read {path}: {error.strerror}") from error
    return _run(path.resolve(), source)


@functools.cache
def _run(path: Path, source: bytes) -> ModuleType:
    """Run the source as a module. Its name is unique to the file and to this version of it.

    The import system would trust cached bytecode by time stamp and size, so the source is compiled here.
    """
    version = hashlib.sha256(bytes(path) + b":" + source).hexdigest()
    name = f"{path.stem}_{version[:12]}"
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = str(path)
    linecache.checkcache(str(path))  # Triton reads the source of a kernel from there
    search_path = list(sys.path)
    sys.path.append(str(path.parent))  # it can import its neighbours; at the end, so that they hide no other module
    try:
        with watched(name):
            exec(compile(source, path, "exec"), vars(module))
    except raised() as error:
        del sys.modules[name]
        raise NormError(f"{path} does not import: {last_line(error, str(path))}") from error
    finally:
        sys.path[:] = search_path
    return module


def _from_package(place: str) -> ModuleType:
    if place in sys.modules:
        return sys.modules[place]
    try:
        with watched(place):
            return importlib.import_module(place)
    except raised() as error:
        hint = "a class in your own file is path/to/file.py:Name"
        raise NormError(f"{place} does not import: {last_line(error)}; {hint}") from error
