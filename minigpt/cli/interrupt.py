"""End a command within a second of Ctrl-C, wherever it is: with status 130, and without a traceback.

SIGTERM ends it too, at once and with status 143. No temporary file stays.

Python raises KeyboardInterrupt between two of its own instructions. That has three gaps. An import may swallow it or
raise another error in its place. A destructor prints it and goes on. A call into a library that takes long delays it.
So a signal in an import ends the process at once, and after any other a thread ends it if it is not over soon.

This file imports only what is part of the interpreter, since the handler must be there before anything else is
imported: ``signal`` and ``threading`` are Python on top of ``_signal`` and ``_thread``, and take ten times as long.
"""

import _signal as signal  # pyright: ignore[reportMissingImports]
import _thread
import atexit
import os
import sys
import time

TYPE_CHECKING = False  # as in minigpt/__init__.py

if TYPE_CHECKING:
    from types import FrameType
    from typing import Any, NoReturn

STATUS, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
PATIENCE = 0.4  # seconds for the command to end by itself: it closes its files and says what it has kept
IMPORTING = "<frozen importlib"  # begins the names of files of the frames of an import
SHOW_CURSOR = b"\x1b[?25h"  # a bar hides it
CONTINUES = "stopped; the same command continues"
_exit = os._exit  # as it is before anybody replaces it


class Interrupts:
    """Handles SIGINT and SIGTERM from ``start`` to ``stop``. Only a command line's main thread may use it.

    Args:
        words: of the command line.

    Attributes:
        came: there was a SIGINT.
    """

    def __init__(self, words: list[str]) -> None:
        self.came, self.words = False, words
        self._is_over = False
        self._pipe: tuple[int, int] | None = None

    def start(self) -> None:
        """Install the handlers, each unless somebody else handles or ignores its signal, as ``nohup`` does."""
        try:
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, self._handle)
            if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._leave_to_thread)
        except ValueError:  # another thread than the main one, where Python allows no handlers
            return
        if not (self.is_handling or self.is_handling_term):
            return
        self._pipe = reading, writing = os.pipe()
        os.set_blocking(writing, False)
        _thread.start_new_thread(self._wait, (reading,))
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=self._become_child)

    def stop(self) -> None:
        """Give the signals back. From here on the interpreter ends, which a SIGINT does not disturb."""
        if self._pipe is None or self.came:
            return
        self._leave_signals()
        if self.is_handling:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
        os.close(self._pipe[1])  # which ends the thread

    def _become_child(self) -> None:
        """Let SIGTERM end a forked process itself: it has the pipe of its parent, and no thread that waits."""
        self._leave_signals()
        _unblock()

    def _leave_signals(self) -> None:
        """Give SIGTERM back."""
        if self.is_handling or self.is_handling_term:
            signal.set_wakeup_fd(-1)
        if self.is_handling_term:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def end(self, status: int = STATUS) -> "NoReturn":
        """End the process: no temporary file and no child stays."""
        if self._is_over:
            time.sleep(PATIENCE)  # the other thread ends it
            _exit(status)
        self._is_over = True
        try:
            if os.isatty(2):
                os.write(2, SHOW_CURSOR)
            if continues(self.words):
                os.write(2, f"{CONTINUES}\n".encode())
            _call("minigpt.files", "remove_temporaries")
            for child in _call("multiprocessing", "active_children") or ():
                child.kill()
        finally:  # also where standard error is closed
            _exit(status)

    def end_after_cleaning(self) -> "NoReturn":
        """Let the functions of ``atexit`` run, then end the process: the interpreter's own end may take long."""
        try:
            sys.stdout.flush()
            atexit._run_exitfuncs()
        except BaseException:  # no one reads the output, or another thread runs them
            pass
        finally:
            self.end()

    def _handle(self, _number: int, frame: "FrameType | None") -> None:
        if self.came:
            return  # the process ends already
        self.came = True
        sys.excepthook = lambda *_: self.end_after_cleaning()
        sys.unraisablehook = lambda _: None
        while frame is not None:
            if frame.f_code.co_filename.startswith(IMPORTING):
                self.end()
            frame = frame.f_back
        raise KeyboardInterrupt

    def _leave_to_thread(self, _number: int, _frame: "FrameType | None") -> None:
        """Do nothing: the thread ends the process, since a call into a library may delay this handler."""

    def _wait(self, reading: int) -> None:
        """Wait for a signal, then end the process: after a SIGINT if it does not end by itself."""
        while number := os.read(reading, 1):
            if number[0] == signal.SIGTERM and self.is_handling_term:
                self.end(TERMINATED)
            if number[0] == signal.SIGINT and self.is_handling:  # a server has its own handler
                time.sleep(PATIENCE)
                self.end()
        os.close(reading)

    @property
    def is_handling(self) -> bool:
        return signal.getsignal(signal.SIGINT) == self._handle

    @property
    def is_handling_term(self) -> bool:
        return signal.getsignal(signal.SIGTERM) == self._leave_to_thread


def leave(code: object) -> None:
    """End the process with this exit status. Files that are open get what was written to them.

    Return where the interpreter has to end it: the status is no number, or a file cannot be written.
    """
    import gc
    import io

    if code is None:
        code = 0
    if not isinstance(code, int):
        return
    gc.unfreeze()  # else what somebody has frozen is left out
    writers = (io.BufferedWriter, io.BufferedRandom, io.TextIOWrapper)
    try:
        for one in gc.get_objects():
            if issubclass(type(one), writers) and not one.closed:
                one.flush()
    except (OSError, ValueError):
        return
    _exit(code)


def _block() -> None:
    """Hold SIGTERM back while this thread forks: the child must not answer with its parent's handler."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def continues(words: list[str]) -> bool:
    """Return True if a command, given again, goes on with what it has done."""
    return words[:1] in (["study"], ["finetune"]) or "--remove-file" in words


def _call(module: str, name: str) -> "Any":
    """Call a function of a module, if the module has been imported."""
    function = getattr(sys.modules.get(module), name, None)
    return None if function is None else function()
