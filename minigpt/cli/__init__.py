"""The command line: one file for each command, which parses, calls and prints.

To add a command, write ``cli/NAME.py`` with a function NAME, and add NAME to COMMANDS in ``cli/commands.py``. Its
parameters and its docstring become arguments, options and help: see ``options.add``. Import heavy packages inside the
function, since ``minigpt --help`` must not wait for them.
"""

import atexit
import gc
import io
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from functools import partial
from multiprocessing import active_children
from types import FrameType
from typing import NoReturn

from minigpt.files import remove_temporaries

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SHOW_CURSOR = b"\x1b[?25h"  # a bar hides it
CONTINUES = b"stopped; the same command continues\n"
FAULT = 70  # EX_SOFTWARE of sysexits.h
WRITERS = (io.BufferedWriter, io.BufferedRandom, io.TextIOWrapper)


def program() -> NoReturn:
    """Run ``main`` as the installed command: with three streams, until a signal ends it, and to a quick end."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # it was closed, and the next file would get its number
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    end_at_signals(sys.argv[1:])
    statuses: list[int] = []
    atexit.register(lambda: _end(*statuses))  # the first, so it is called last
    statuses.append(_status())
    sys.exit(*statuses)


def main() -> NoReturn:
    """Run the command line and exit.

    The status is 0, or 1 for a verdict: parity does not hold, a norm is not a LayerNorm, a cell of a study failed.
    After an error in what a user gives, which is one line on standard error, it is 2. After any other, with its
    traceback, it is 70: whatever goes wrong, 1 is a verdict. After a closed pipe it is 141.
    """
    sys.exit(_status())


def _status() -> int:
    try:
        from minigpt.cli.commands import run

        return run(sys.argv[1:])
    except BaseException:
        with suppress(OSError):  # nobody reads it
            traceback.print_exc()
        return FAULT


def end_at_signals(words: list[str]) -> None:
    """End the process at Ctrl-C, SIGTERM or SIGHUP from now on: at once, without a traceback or a temporary file.

    The status is 128 and the signal's number: 130, 143, 129. A thread ends the process, since Python runs a handler
    only between two instructions of the main thread, and a call into a library may take long. A signal that is ignored
    stays so, as under ``nohup``. Another handler may take a signal over, as a server's does.

    Args:
        words: of the command line.
    """
    ending = threading.Lock()

    def end(number: int, _frame: FrameType | None = None) -> NoReturn:
        ending.acquire()  # the thread and the main thread may both come here; the first ends the process
        try:
            if os.isatty(2):
                os.write(2, SHOW_CURSOR)
            if words[:1] in (["study"], ["finetune"]) or {"--remove-file", "--prompts"} & {*words}:
                os.write(2, CONTINUES)
            remove_temporaries()
            for child in active_children():
                child.kill()
        finally:  # also where standard error is closed
            os._exit(128 + number)

    def wait() -> None:
        while True:
            (number,) = os.read(reading, 1)
            if signal.getsignal(number) == end:
                end(number)

    def leave() -> None:
        """Give the signals back in a forked process, which shares the pipe of its parent."""
        signal.set_wakeup_fd(-1)
        for number in ENDING:
            if signal.getsignal(number) == end:
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)

    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=wait, daemon=True).start()
    block = partial(signal.pthread_sigmask, signal.SIG_BLOCK, ENDING)
    unblock = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, ENDING)
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=leave)


def _end(status: int) -> NoReturn:
    """End the process. The interpreter would free all that is imported before, which takes up to a second."""
    for one in gc.get_objects():
        if issubclass(type(one), WRITERS):  # a file that somebody left open
            with suppress(OSError, ValueError):  # ValueError: it is closed
                one.flush()
    os._exit(status)
