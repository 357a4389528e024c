"""The progress of work that has steps."""

import contextlib
import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Progress = Callable[[str, float], None]  # the name of a step, and the share of steps done before it, in [0, 1)
FIRST_SECONDS = 2.0  # of a step, in which nobody asks how long it takes
LARGEST_SHARE = 0.99  # of a step that goes on
Item = TypeVar("Item")
SHOWN: list[Callable[[], object]] = []  # clears the line of a notebook


class Steps:
    """A counter of steps.

    Args:
        progress: called at the beginning of each step. None shows the steps in a notebook, and nothing elsewhere.
        total: the number of steps, if it is known.
    """

    def __init__(self, progress: Progress | None, total: int = 0) -> None:
        self.progress, self.total, self.begun = progress or _in_notebook(self), total, 0
        self.step, self.step_started = "", time.monotonic()

    def __call__(self, step: str) -> None:
        """Begin a step."""
        self.step, self.step_started = step, time.monotonic()
        if self.progress is not None:
            self.progress(step, self.begun / max(self.total, self.begun + 1))
        self.begun += 1

    def each(self, items: Iterable[Item], total: int, first: int = 1, of: str = "text") -> Iterator[Item]:
        """Yield items of a step. Say with each how many there were, and how long the rest takes, if it takes long.

        Args:
            total: of the items of the step.
            first: the number of the first one here.
            of: what one is called.
        """
        for number, item in enumerate(items, first):
            seconds, share = time.monotonic() - self.step_started, number / total
            if self.progress is not None and seconds > FIRST_SECONDS:
                done = (self.begun - 1 + min(share, LARGEST_SHARE)) / max(self.total, self.begun)
                self.progress(f"{self.step}: {of} {number} of {total}{time_left(seconds, share)}", done)
            yield item


def _in_notebook(work: object) -> Progress | None:
    """Return a progress that a notebook shows in one line, until ``work`` is done; None outside of a notebook."""
    ipython = sys.modules.get("IPython")
    if ipython is None or not hasattr(ipython.get_ipython(), "kernel"):
        return None
    while SHOWN:
        SHOWN.pop()()  # a frame in a cycle may keep older work
    line = ipython.display.display({"text/plain": "starting"}, raw=True, display_id=True)
    SHOWN.append(weakref.finalize(work, line.update, {"text/plain": ""}, raw=True))
    return lambda step, done: line.update({"text/plain": f"{done:.0%}: {step}"}, raw=True)


def time_left(seconds: float, share: float) -> str:
    """Return how long the rest takes, in words; empty while nothing is done.

    Args:
        seconds: since the beginning.
        share: what is done.
    """
    if not share:
        return ""
    return f", about {duration(seconds * (1 - share) / share)} left"


def duration(seconds: float) -> str:
    """Format a time: 41 s, 12 min, 3.4 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turn off the log messages of transformers and accelerate, and their progress bars."""
    from transformers.utils import logging as messages

    verbosity, bar = messages.get_verbosity(), messages.is_progress_bar_enabled()
    of_accelerate = logging.getLogger("accelerate")
    level = of_accelerate.level
    messages.set_verbosity_error()
    messages.disable_progress_bar()
    of_accelerate.setLevel(logging.ERROR)
    try:
        yield
    finally:
        messages.set_verbosity(verbosity)
        of_accelerate.setLevel(level)
        if bar:
            messages.enable_progress_bar()
