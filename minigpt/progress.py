"""The progress of work that has steps."""

from collections.abc import Callable

Progress = Callable[[str, float], None]  # the name of a step, and the share of steps done before it, in [0, 1)


class Steps:
    """A counter of steps.

    Args:
        progress: called at the beginning of each step, unless it is None.
        total: the number of steps, if it is known.
    """

    def __init__(self, progress: Progress | None, total: int = 0) -> None:
        self.progress, self.total, self.begun = progress, total, 0
        self.step = ""

    def __call__(self, step: str) -> None:
        """Begin a step."""
        self.step = step
        if self.progress is not None:
            self.progress(step, self.begun / max(self.total, self.begun + 1))
        self.begun += 1

    def within(self, place: str) -> None:
        """Say at which place the present step is. Places come again and again; their number is not known before."""
        if self.progress is not None:
            done = (self.begun - 1) / max(self.total, self.begun)
            self.progress(f"{self.step}: {place}", done)
