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


class Interrupts:
    """Handles the signals that end a command, each unless it is ignored, as under ``nohup``.

    Args:
        words: of the command line.
    """

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self._ending = threading.Lock()

    def start(self) -> None:
        """Handle them from now on. Another handler may take a signal over, as a server's does."""
        for number in ENDING:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._end)
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        threading.Thread(target=self._wait, args=(reading,), daemon=True).start()
        block = partial(signal.pthread_sigmask, signal.SIG_BLOCK, ENDING)
        unblock = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, ENDING)
        os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=self._leave)

    def _wait(self, reading: int) -> None:
        while True:
            (number,) = os.read(reading, 1)
            if signal.getsignal(number) == self._end:
                self._end(number)

    def _leave(self) -> None:
        """Give the signals back in a forked process, which shares the pipe of its parent."""
        signal.set_wakeup_fd(-1)
        for number in ENDING:
            if signal.getsignal(number) == self._end:
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)

    def _end(self, number: int, _frame: FrameType | None = None) -> NoReturn:
        self._ending.acquire()  # the thread and the main thread may both come here; the first ends the process
        try:
            if os.isatty(2):
                os.write(2, SHOW_CURSOR)
            if self.words[:1] in (["study"], ["finetune"]) or {"--remove-file", "--prompts"} & {*self.words}:
                os.write(2, CONTINUES)
            remove_temporaries()
            for child in active_children():
                child.kill()
        finally:  # also where standard error is closed
            os._exit(128 + number)
