"""The checkpoints of a training that is started again: which one is whole, and what a killed run has left."""

import contextlib
import json
import logging
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from minigpt.errors import CheckpointError
from minigpt.files import remove

TRAINED_WEIGHTS, TRAINER_STATE = "weights.pt", "trainer_state.json"
TORCH_FILES = (".pt", ".pth")
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


def resumable_step(folder: Path, steps: int) -> int | None:
    """Return the step of the newest checkpoint in ``folder`` that is whole; None if there is none.

    Trainer would add a step to one of the last step, so that is left out.
    """
    for step, place in checkpoints_in(folder):
        if step < steps and damage_of(place) is None:
            return step
    return None


def newest_written(folder: Path, steps: int) -> int | None:
    """Return the step of the newest checkpoint that this run has written, as ``resumable_step``. No file is read."""
    for step, place in checkpoints_in(folder):
        if step < steps and not is_cut(place):
            return step
    return None


def checkpoints_in(folder: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints in a folder, whole or not, with their steps: the newest first."""
    found = []
    for place in folder.glob("checkpoint-*"):
        number = place.name.removeprefix("checkpoint-")
        if number.isdecimal():
            found.append((int(number), place))
    return sorted(found, reverse=True)


def is_cut(place: Path) -> bool:
    """Return True if a checkpoint was not written to its end: it has no trainer_state.json, its last file."""
    return not (place / TRAINER_STATE).is_file()


def damage_of(place: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None. Every file is read, and held to its checksums."""
    if is_cut(place):
        return "was cut short"
    try:
        step = json.loads((place / TRAINER_STATE).read_text())["global_step"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"has a damaged {TRAINER_STATE}"
    if place.name != f"checkpoint-{step}":
        return f"has the {TRAINER_STATE} of step {step}"
    if not (place / TRAINED_WEIGHTS).is_file():
        return f"has no {TRAINED_WEIGHTS}"
    for file in sorted(place.iterdir()):
        if file.suffix in TORCH_FILES and not _is_whole_archive(file):
            return f"has a damaged {file.name}"
    return None


def _is_whole_archive(file: Path) -> bool:
    """Return True if the file is a ZIP archive, as torch.save writes it, whose parts have their checksums."""
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.testzip() is None
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error):  # of damaged headers too
        return False


def note_damaged(folder: Path, steps: int) -> None:
    """Log which checkpoints are newer than the one that the run goes on from, and why it cannot take them."""
    resumed = resumable_step(folder, steps)
    goes_on = "begins again at step 0"
    if resumed is not None:
        goes_on = f"goes on from step {resumed}"
    for step, place in checkpoints_in(folder):
        if resumed is not None and step <= resumed:
            break  # all others are older
        damage = damage_of(place)
        if damage is not None:
            logging.getLogger("minigpt").warning("%s %s, so the run %s", place, damage, goes_on)


def remove_cut(folder: Path) -> None:
    """Remove the checkpoints that killed runs have not written to their end, of every run in ``folder``."""
    for place in folder.glob("*/checkpoint-*"):
        if is_cut(place):
            remove(place)
