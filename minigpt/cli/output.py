"""What the commands read, write and print, and the progress that they show."""

import json
import os
import posix
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from minigpt.errors import MiniGPTError
from minigpt.files import not_utf8

NARROWEST, WIDEST = 40, 10_000  # columns
BETWEEN_LINES = 15  # seconds between two lines of progress in a pipe


def console() -> Console:
    """Return a console for standard output that prints text unchanged: a name may contain [brackets] or :colons:.

    A pipe has no width: nothing that goes there is cut or wrapped, unless COLUMNS says so.
    """
    console = Console(highlight=False, markup=False, emoji=False)
    in_pipe = not console.is_terminal and "COLUMNS" not in os.environ
    console.width = WIDEST if in_pipe else max(console.width, NARROWEST)
    return console


def for_terminal(text: str) -> str:
    """Return the text with its control characters escaped, except newlines and tabs: a terminal would obey them."""
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) != "Cc" else c.encode("unicode_escape").decode() for c in text
    )


def show(
    summary: RenderableType,
    fields: Any,
    json_file: str | None = None,
    html: Path | None = None,
    page: Callable[[], str] = str,
) -> None:
    """Print a report, and write it as JSON and as a page; "-" prints the JSON instead."""
    if json_file != "-":  # printed first, in case a file cannot be written
        console().print(summary)
    if json_file is not None:
        print_json(fields, json_file)
    if html is not None:
        write(html, page())


def print_json(fields: Any, file: str) -> None:
    """Write JSON to a file; "-" prints it. Other characters than ASCII are escaped, so that any output can carry it."""
    text = json.dumps(fields, indent=2, allow_nan=False)
    if file == "-":
        print(text)
    else:
        write(file, text + "\n")


def require_writable(*files: str | Path | None) -> None:
    """Check that files can be written, before minutes of work are spent on their contents.

    Raises:
        MiniGPTError: the message names the first that cannot.
    """
    for file in files:
        if file is None or str(file) == "-":
            continue
        place = Path(file)
        if place.is_dir() or not os.access(place if place.exists() else place.parent, os.W_OK):
            raise MiniGPTError(f"cannot write {file}: it is a folder, its folder is missing, or permission is denied")


def write(file: str | Path, text: str) -> None:
    """Write a text file in UTF-8.

    Raises:
        MiniGPTError: if it cannot be written.
    """
    try:
        Path(file).write_bytes(text.encode("utf-8", "backslashreplace"))  # tokens may be half a character
    except OSError as error:
        raise MiniGPTError(f"cannot write {file}: {error.strerror}") from error


def read_standard_input() -> str:
    """Return all of standard input.

    Raises:
        MiniGPTError: if it is not UTF-8 text.
    """
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise MiniGPTError(not_utf8("standard input", error)) from error


def said_aside() -> redirect_stdout[Any]:
    """Print to standard error in the block: standard output is for the result, and a user's norm may print."""
    return redirect_stdout(sys.stderr)


@contextmanager
def progress(*, lines: bool = False) -> Iterator[Callable[[str, float], None]]:
    """Show each step, the share that is done, and the time; all other output in the block goes to standard error.

    A terminal shows a bar, which disappears at the end.

    Args:
        lines: where there is no terminal for a bar, print a line every 15 seconds: for commands that run for hours.
    """
    columns = (SpinnerColumn(), BarColumn(20), TextColumn("{task.description}"), TimeElapsedColumn())
    begin = shown = time.monotonic()

    def line(step: str, done: float) -> None:
        nonlocal shown
        if lines and time.monotonic() - shown >= BETWEEN_LINES:
            shown = time.monotonic()
            print(f"{shown - begin:.0f} s, {done:.0%}: {step}", file=sys.stderr, flush=True)

    console = Console(stderr=True)
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with said_aside(), bar as progress:
        task = progress.add_task("starting", total=1.0)
        yield line if progress.disable else lambda step, done: progress.update(task, description=step, completed=done)


def never_exit_silently() -> None:
    """From now on code that ends this process with status 0 or 1, or becomes another program, gives status 2.

    For commands that run somebody else's norm: their status tells whether there is a result. Processes that are forked
    end as they like.
    """
    owner, end = os.getpid(), os._exit

    def refuse(*_: object) -> NoReturn:
        print("error: the norm's code ended the process, so there is no result", file=sys.stderr, flush=True)
        end(2)

    def ended(status: int) -> NoReturn:
        if os.getpid() == owner and status in (0, 1):
            refuse()
        end(status)

    def replaced(program: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *words: refuse() if os.getpid() == owner else program(*words)

    for module in (os, posix):
        replacements = {name: replaced(getattr(module, name)) for name in ("execv", "execve")}  # all of exec's forms
        for name, function in ({"_exit": ended} | replacements).items():
            setattr(module, name, function)
