"""The progress of work that has steps."""

import time
from collections.abc import Callable

Progress = Callable[[str, float], None]  # the name of a step, and the share of steps done before it, in [0, 1)
FIRST_SECONDS = 2.0  # of a step, in which nobody can say how long it takes
LARGEST_SHARE = 0.99  # of a step that goes on


class Steps:
    """A counter of steps.

    Args:
        progress: called at the beginning of each step, unless it is None.
        total: the number of steps, if it is known.
    """

    def __init__(self, progress: Progress | None, total: int = 0) -> None:
        self.progress, self.total, self.begun = progress, total, 0
        self.step, self.step_started = "", time.monotonic()

    def __call__(self, step: str) -> None:
        """Begin a step."""
        self.step, self.step_started = step, time.monotonic()
        if self.progress is not None:
            self.progress(step, self.begun / max(self.total, self.begun + 1))
        self.begun += 1

    def within(self, place: str, share: float = 0.0) -> None:
        """Say at which place the present step is, and the time that the rest of the step takes.

        Args:
            share: of the step that is done, from 0 to 1.
        """
        if self.progress is None:
            return
        done = (self.begun - 1 + min(share, LARGEST_SHARE)) / max(self.total, self.begun)
        left = time_left(time.monotonic() - self.step_started, share)
        self.progress(f"{self.step}: {place}{left}", done)


def time_left(seconds: float, share: float) -> str:
    """Return how long the rest of a step takes, in words; nothing while nobody can say so.

    Args:
        seconds: since the step began.
        share: of the step that is done.
    """
    if seconds < FIRST_SECONDS or not 0 < share < 1:
        return ""
    left = seconds * (1 - share) / share
    if left < 90:
        return f", {left:.0f} s left of this step"
    return f", {left / 60:.0f} min left of this step"
