"""The command line: one file for each command, which parses, calls and prints.

To add a command, write ``cli/NAME.py`` with a function NAME, and add NAME to COMMANDS in ``cli/commands.py``. Its
parameters and its docstring become arguments, options and help: see ``options.add``. Import heavy packages inside the
function, since ``minigpt --help`` must not wait for them.
"""

import atexit
import gc
import io
import os
import sys
import traceback
from contextlib import suppress
from typing import NoReturn

FAULT = 70  # EX_SOFTWARE of sysexits.h
WRITERS = (io.BufferedWriter, io.BufferedRandom, io.TextIOWrapper)


def program() -> NoReturn:
    """Run ``main`` as the installed command: with three streams, until a signal ends it, and to a quick end."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # it was closed, and the next file would get its number
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    from minigpt.cli.interrupt import end_at_signals

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


def _end(status: int) -> NoReturn:
    """End the process. The interpreter would free all that is imported before, which takes up to a second."""
    for one in gc.get_objects():
        if issubclass(type(one), WRITERS):  # a file that somebody left open
            with suppress(OSError, ValueError):  # ValueError: it is closed
                one.flush()
    os._exit(status)
