"""The checkpoints of a training that is started again: which one is whole, and what a killed run has left."""

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from minigpt.errors import CheckpointError
from minigpt.files import remove

TRAINED_WEIGHTS, TRAINER_STATE = "weights.pt", "trainer_state.json"
TORCH_WRITER = "inline_container"  # in the message of a RuntimeError: torch.save could not write


@contextlib.contextmanager
def writing(folder: Path, resumes_at: Callable[[], int | None]) -> Iterator[None]:
    """Turn errors of writing into ``folder`` into a CheckpointError, which says what the same command would do."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and TORCH_WRITER not in str(error):
            raise
        reason = getattr(error, "strerror", None) or "the disk may be full"
        step = resumes_at()
        goes_on = "begins again at step 0"
        if step is not None:
            goes_on = f"goes on from the checkpoint of step {step}"
        raise CheckpointError(f"cannot write to {folder}: {reason}; the same command {goes_on}") from error


@contextlib.contextmanager
def reading(place: str | Path) -> Iterator[None]:
    """Turn errors of reading a checkpoint's files into a CheckpointError, which says how to go on without it."""
    try:
        yield
    except Exception as error:  # torch.load raises many kinds
        raise CheckpointError(f"{place} is damaged; remove it, and the same command goes on without it") from error


def resumable_step(folder: Path, steps: int) -> int | None:
    """Return the step of the newest checkpoint in ``folder`` that was written to its end; None if there is none.

    Trainer would add a step to one of the last step, so that is left out.
    """
    for step, place in checkpoints_in(folder):
        if step < steps and not is_cut(place):
            return step
    return None


def checkpoints_in(folder: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints in a folder, whole or not, with their steps: the newest first."""
    checkpoints = []
    for place in folder.glob("checkpoint-*"):
        number = place.name.removeprefix("checkpoint-")
        if number.isdecimal():
            checkpoints.append((int(number), place))
    return sorted(checkpoints, reverse=True)


def is_cut(place: Path) -> bool:
    """Return True if a checkpoint was not written to its end: its last file is not there, or not whole."""
    try:
        json.loads((place / TRAINER_STATE).read_bytes())
    except (OSError, ValueError):
        return True
    return False


def note_cut(folder: Path, steps: int) -> None:
    """Log which checkpoints are newer than the one that the run goes on from."""
    resumed = resumable_step(folder, steps)
    goes_on = "begins again at step 0"
    if resumed is not None:
        goes_on = f"goes on from step {resumed}"
    for _, place in checkpoints_in(folder):
        if is_cut(place):
            logging.getLogger("minigpt").warning("%s was cut short, so the run %s", place, goes_on)


def remove_cut(folder: Path) -> None:
    """Remove the checkpoints that killed runs have not written to their end, of every run in ``folder``."""
    for place in folder.glob("*/checkpoint-*"):
        if is_cut(place):
            remove(place)
