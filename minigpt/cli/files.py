"""What the commands read, write and print, and what they show while they work."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

from minigpt.errors import MiniGPTError
from minigpt.text_file import read_text

NARROWEST = 40  # columns, less than which nothing can be read in


def console() -> Console:
    """Standard output, on which text is what it is: a model's name may hold [brackets] or :colons:."""
    console = Console(highlight=False, markup=False, emoji=False)
    console.width = max(console.width, NARROWEST)
    return console


def show(summary: RenderableType, fields: Any, json_file: str | None) -> None:
    """A report on standard output, and as JSON in a file; in its stead where the file is '-'."""
    if json_file != "-":  # before the file, which may fail
        console().print(summary)
    if json_file is not None:
        print_json(fields, json_file)


def print_json(fields: Any, file: str) -> None:
    if file == "-":
        print(_json(fields, is_ascii=not (sys.stdout.encoding or "").lower().startswith("utf")))
    else:
        write(file, _json(fields) + "\n")


def _json(fields: Any, is_ascii: bool = False) -> str:
    return json.dumps(fields, indent=2, ensure_ascii=is_ascii, allow_nan=False)


def require_name(option: str, file: Path | None) -> None:
    """Refuse '-', which stands for a stream where there is one to write to.

    Raises:
        MiniGPTError: the message names the option.
    """
    if file is not None and str(file) == "-":
        raise MiniGPTError(f"{option} writes a file, and '-' is none; ./- would be one of that name")


def require_writable(*files: str | Path | None, beside: Iterable[Path | None] = ()) -> None:
    """Refuse files that cannot all be written before minutes of work are lost on them; ``beside`` are to stay.

    Raises:
        MiniGPTError: the message names the first.
    """
    taken = {os.path.realpath(file) for file in beside if file is not None}
    for file in files:
        if file is None or str(file) == "-":
            continue
        place = Path(os.path.realpath(file))
        if place.is_dir():
            raise MiniGPTError(f"cannot write {file}: it is a folder")
        if place.is_symlink() or not place.parent.is_dir():
            raise MiniGPTError(f"cannot write {file}: the folder for it does not exist")
        if not os.access(place if place.exists() else place.parent, os.W_OK):
            raise MiniGPTError(f"cannot write {file}: permission denied")
        if str(place) in taken:
            raise MiniGPTError(f"{file} is read, or written, by this command already; give another file")
        taken |= {str(place)} if place.is_file() or not place.exists() else set()


def write(file: str | Path, text: str) -> None:
    """Half a character, which UTF-8 cannot hold, is written as JSON escapes it.

    Raises:
        MiniGPTError: the file cannot be written.
    """
    data = text.encode("utf-8", "backslashreplace")
    try:
        Path(file).write_bytes(data)
    except OSError as error:
        raise MiniGPTError(f"cannot write {file}: {error.strerror}") from error


def read_json(file: Path) -> Any:
    """What the JSON in a file spells.

    Raises:
        MiniGPTError: it cannot be read, or is no JSON.
    """
    text = read_text(file)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MiniGPTError(f"{file} is not JSON: {error}") from error


def read_standard_input() -> str:
    """All of it.

    Raises:
        MiniGPTError: it is closed, or no text in UTF-8.
    """
    if sys.stdin is None:
        raise MiniGPTError("standard input is closed, and was to be read")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise MiniGPTError(f"standard input is not UTF-8: {error}") from error


def said_aside() -> redirect_stdout[Any]:
    """Standard output carries the result alone: what somebody's norm prints meanwhile goes to standard error."""
    return redirect_stdout(sys.stderr)


def made_aside(pieces: Iterator[str]) -> Iterator[str]:
    """The pieces, each made ``said_aside``."""
    while True:
        with said_aside():
            piece = next(pieces, None)
        if piece is None:
            return
        yield piece


def bar(*columns: ProgressColumn) -> Progress:
    """These on standard error, where that is a terminal, and gone at the end."""
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def progress() -> Iterator[Callable[[str, float], None]]:
    """Shows on standard error what is being done, how far it has come, and for how long; all else is ``said_aside``."""
    columns = (SpinnerColumn(), BarColumn(20), TextColumn("{task.description}"), TimeElapsedColumn())
    with said_aside(), bar(*columns) as progress:
        task = progress.add_task("starting", total=1.0)
        yield lambda step, done: progress.update(task, description=step, completed=done)
