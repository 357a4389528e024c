"""How far a long run has come, told to whoever waits for it."""

from collections.abc import Callable

Progress = Callable[[str, float], None]  # what is being done now, and the share of the steps done before it, in [0, 1)


class Steps:
    """Counts steps as they begin.

    Args:
        progress: told of each; None where nobody waits.
        total: how many there will be, as far as that is known.
    """

    def __init__(self, progress: Progress | None, total: int = 0) -> None:
        self.progress, self.total, self.begun = progress, total, 0

    def __call__(self, step: str) -> None:
        """A step begins."""
        if self.progress is not None:
            self.progress(step, self.begun / max(self.total, self.begun + 1))
        self.begun += 1
