"""End a command at Ctrl-C, SIGTERM or SIGHUP: at once, without a traceback, and no temporary file stays.

The status is 128 and the signal's number: 130, 143, 129. A thread ends the process, since Python runs a handler only
between two instructions of the main thread, and a call into a library may take long.
"""

import os
import signal
import threading
from functools import partial
from multiprocessing import active_children
from types import FrameType
from typing import NoReturn

from minigpt.files import remove_temporaries

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SHOW_CURSOR = b"\x1b[?25h"  # a bar hides it
CONTINUES = b"stopped; the same command continues\n"


def end_at_signals(words: list[str]) -> None:
    """Handle the signals that end a command from now on, each unless it is ignored, as under ``nohup``.

    Another handler may take a signal over, as a server's does.

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
