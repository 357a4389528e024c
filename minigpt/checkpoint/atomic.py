"""Replace a folder's files at one moment: a crash leaves the old files or the new ones, whole.

The new files are written to a folder beside it and flushed to the disk. Then the two folders exchange their names in
one system call. Where that is impossible (a mount point, the working directory, a folder that contains folders, a file
system without the call), files are moved in one by one, config.json last. A crash can then leave a folder without a
config.json, which nothing loads, but never a mixture.
"""

import ctypes
import fnmatch
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minigpt.checkpoint.files import CONFIG, MODEL


@contextmanager
def replacing(folder: Path, replaced: tuple[str, ...] = MODEL) -> Iterator[Path]:
    """Yield a new folder to write into. Its files appear in ``folder`` when the block has ended without an error.

    Files in ``folder`` that match the patterns ``replaced`` go. All others stay.

    Raises:
        OSError: if it cannot be written.
    """
    folder = Path(os.path.realpath(folder.expanduser()))  # a link stays a link
    here = Path.cwd()
    is_fixed = os.path.ismount(folder) or folder in (here, *here.parents) or not os.access(folder.parent, os.W_OK)
    can_exchange = not (folder.exists() and is_fixed)
    new = (folder.parent if can_exchange else folder) / f".{folder.name}.being-saved"
    shutil.rmtree(new, ignore_errors=True)  # left by a process that was killed
    new.mkdir(parents=True)
    try:
        yield new
        for path in (*new.iterdir(), new):
            _flush(path)
        if not folder.exists():
            new.rename(folder)
        else:
            goes = [path for path in folder.iterdir() if any(fnmatch.fnmatchcase(path.name, one) for one in replaced)]
            if not (can_exchange and _exchanged(folder, new, goes)):
                _move_in(folder, new, goes)
        _flush(folder.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)  # by now the old files


def _exchanged(folder: Path, new: Path, goes: list[Path]) -> bool:
    """Exchange two folders' names in one call. Return False if the system or the file system cannot."""
    libc, names = ctypes.CDLL(None), (os.fsencode(folder), os.fsencode(new))
    if any(path.is_dir() for path in folder.iterdir()):  # which no link can keep
        return False
    try:
        shutil.copymode(folder, new)
        for path in folder.iterdir():  # files that are not part of a checkpoint stay
            if path not in goes and not (new / path.name).exists():
                os.link(path, new / path.name, follow_symlinks=False)
    except OSError:
        return False
    if hasattr(libc, "renameat2"):  # Linux: from the working directory (-100), RENAME_EXCHANGE (2)
        return libc.renameat2(-100, names[0], -100, names[1], 2) == 0
    if hasattr(libc, "renamex_np"):  # macOS: RENAME_SWAP (2)
        return libc.renamex_np(*names, 2) == 0
    return False


def _move_in(folder: Path, new: Path, goes: list[Path]) -> None:
    """Move the new files in, config.json last: without one the folder is not a checkpoint."""
    (folder / CONFIG).unlink(missing_ok=True)
    for path in goes:
        path.unlink(missing_ok=True)
    for path in sorted(new.iterdir(), key=lambda path: path.name == CONFIG):
        path.replace(folder / path.name)


def _flush(path: Path) -> None:
    """Flush a file, or a folder's list of files, to the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
