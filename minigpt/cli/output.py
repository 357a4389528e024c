"""Reading, writing and printing of the commands, and the progress that they show."""

import json
import os
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.segment import Segment

from minigpt.errors import MiniGPTError
from minigpt.files import not_utf8, write_atomically

NARROWEST, WIDEST = 40, 10_000  # columns
LINE_SECONDS = 10  # between two lines of progress in a pipe
STDOUT = Path("-")  # in the place of a file


class ResultConsole(Console):
    """A console for standard output that prints text unchanged: a name may contain [brackets] or :colons:.

    A pipe has no width: nothing that goes there is cut or wrapped, unless COLUMNS says so.
    """

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False, emoji=False)
        in_pipe = not self.is_terminal and "COLUMNS" not in os.environ
        if in_pipe:
            self.width = WIDEST
        else:
            self.width = max(self.width, NARROWEST)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the parts of what is printed; what a file names may hold control characters."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=for_terminal(segment.text))


def for_terminal(text: str) -> str:
    """Return the text with its control characters escaped, except newlines and tabs: a terminal would obey them."""
    shown: list[str] = []
    for character in text:
        is_control = unicodedata.category(character) == "Cc" and character not in "\n\t"
        if is_control:
            character = character.encode("unicode_escape").decode()
        shown.append(character)
    return "".join(shown)


def show(
    summary: RenderableType,
    fields: Any,
    json_file: Path | None = None,
    html: Path | None = None,
    page: Callable[[], str] = str,
) -> None:
    """Print a report, and write it as JSON and as a page; "-" prints the JSON instead."""
    if json_file == STDOUT:
        print(json_text(fields), end="")
    else:  # printed first, in case a file cannot be written
        ResultConsole().print(summary)
        if json_file is not None:
            write(json_file, json_text(fields))
    if html is not None:
        write(html, page())


def json_text(fields: Any) -> str:
    """Return JSON. Other characters than ASCII are escaped, so that any output can carry it."""
    return json.dumps(fields, indent=2, allow_nan=False) + "\n"


def check_writable(file: Path | None) -> Path | None:
    """Return a file that a command writes at its end: one that cannot be written is an error before the work.

    Raises:
        MiniGPTError: if it is a folder, its folder is missing, or permission is denied.
    """
    if file not in (None, STDOUT) and not _is_writable(file):
        raise MiniGPTError(f"cannot write {file}: it is a folder, its folder is missing, or permission is denied")
    return file


def _is_writable(file: Path) -> bool:
    if file.is_dir():
        return False
    if file.exists() and not os.access(file, os.W_OK):
        return False
    is_device = file.exists() and not file.is_file()
    if is_device:
        return True
    folder = file.parent  # a new file in it takes the old one's name
    return folder.is_dir() and os.access(folder, os.W_OK)


def check_folder(folder: Path | None) -> Path | None:
    """Return a folder that a command fills, and makes if need be.

    Raises:
        MiniGPTError: if it cannot be made or written to.
    """
    if folder is None:
        return None
    place = folder
    while not place.exists():
        place = place.absolute().parent
    if not (place.is_dir() and os.access(place, os.W_OK)):
        raise MiniGPTError(f"cannot write to {folder}: {place} is no folder, or permission is denied")
    return folder


def write(file: Path, text: str) -> None:
    """Write a text file in UTF-8, whole or not at all.

    Raises:
        MiniGPTError: if it cannot be written. The old file stays.
    """
    try:
        write_atomically(file, text.encode("utf-8", "backslashreplace"))  # tokens may be half a character
    except OSError as error:
        raise MiniGPTError(f"cannot write {file}: {error.strerror}") from error


def read_standard_input() -> str:
    """Return all of standard input, without a byte order mark.

    Raises:
        MiniGPTError: if it is not UTF-8 text.
    """
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MiniGPTError(not_utf8("standard input", error)) from error


class Pulse:
    """Lines on standard error that show that a command goes on, for a pipe, which has no bar.

    Attributes:
        step, done: the newest of ``progress``.
    """

    step, done = "starting", 0.0
    _stopped, _printing = threading.Event(), threading.Lock()

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Print a line every LINE_SECONDS while the block runs, unless standard error is a terminal."""
        self.step, self.done, self._stopped = "starting", 0.0, threading.Event()
        if not Console(stderr=True).is_terminal:
            threading.Thread(target=self._beat, args=(self._stopped,), name="minigpt-pulse", daemon=True).start()
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        """Print no further line, since the result itself is printed from here on. A line under way is awaited."""
        with self._printing:
            self._stopped.set()

    def _beat(self, stopped: threading.Event) -> None:
        begin = time.monotonic()
        while not stopped.wait(LINE_SECONDS):
            seconds = time.monotonic() - begin
            with self._printing, suppress(OSError, ValueError):  # nobody reads it, or it is closed
                if stopped.is_set():
                    return
                print(f"{seconds:.0f} s, {self.done:.0%}: {self.step}", file=sys.stderr, flush=True)


PULSE = Pulse()  # of the command that this process runs


@contextmanager
def progress() -> Iterator[Callable[[str, float], None]]:
    """Show each step, the share that is done, and the time; all other output in the block goes to standard error.

    A terminal shows a bar, which disappears at the end. In a pipe, PULSE prints the newest step now and then.
    """
    columns = (SpinnerColumn(), BarColumn(20), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    console = Console(stderr=True)
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with redirect_stdout(sys.stderr), bar:  # standard output is for the result, and a user's norm may print
        task = bar.add_task("starting", total=1.0)

        def say(step: str, done: float) -> None:
            step = for_terminal(step)
            PULSE.step, PULSE.done = step, done
            bar.update(task, description=step, completed=done)

        yield say
