"""Python's searches for unreachable cycles, which walk all that is imported."""

import contextlib
import gc
from collections.abc import Iterator


def age() -> None:
    """Make all objects old without walking them, so that a search among young ones leaves them out."""
    if gc.get_freeze_count() == 0:  # else somebody has taken objects out of all searches
        gc.freeze()
        gc.unfreeze()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Begin no search in the block, where packages are imported. At its end ``age`` makes all objects old."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        age()
        if was_on:
            gc.enable()
