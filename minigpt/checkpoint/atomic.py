"""A folder's files replaced at one moment: whoever looks, or stops everything, finds the old ones or the new, whole.

The new files are written to a folder beside and brought to the disk; then the two folders exchange their names in one
call of the system. Where that cannot be (a file system without the call, a mount point, the working directory, a folder
that has folders in it), files are moved in one by one, config.json last: a crash can then leave a folder without a
config.json, which nothing loads, but never a mixture.
"""

import ctypes
import errno
import fcntl
import fnmatch
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from minigpt.checkpoint.files import CONFIG, GENERATION_CONFIG, INDEX, SAFETENSORS, SHARDS

REPLACED = (CONFIG, SAFETENSORS, INDEX, SHARDS, GENERATION_CONFIG)
UNFINISHED = ".being-saved"


@contextmanager
def replacing(folder: Path, replaced: tuple[str, ...] = REPLACED) -> Iterator[Path]:
    """A new folder to write into; when the block has ended, and not before, what it holds stands in ``folder``.

    Files of an earlier checkpoint go, which have the names ``replaced``; whatever else is there stays. If the block
    raises, ``folder`` is as it was.

    Raises:
        OSError: it cannot be written.
    """
    folder = resolved(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder if folder.is_dir() and not _may_be_renamed(folder) else folder.parent
    _remove_abandoned(beside, folder.name)
    new, mark = _new_folder(beside, folder.name)
    try:
        yield new
        for path in (*new.iterdir(), new):
            _flush(path)
        if folder.exists() or not _named_first(new, folder):
            _replace(folder, new, replaced)
        _flush(folder.parent)
    finally:
        os.close(mark)
        shutil.rmtree(new, ignore_errors=True)  # by now the old files, or what was left half-way


def resolved(folder: str | os.PathLike[str]) -> Path:
    """Where a folder is, or would be, whatever links lead there."""
    return Path(os.path.realpath(os.path.expanduser(folder)))  # pathlib's own raise where there is no such user


def _new_folder(beside: Path, name: str) -> tuple[Path, int]:
    """A folder that is locked while this process lives, so that another can tell what was abandoned; and its lock."""
    while True:
        new = beside / f".{name[:100]}.{secrets.token_hex(6)}{UNFINISHED}"
        new.mkdir()
        with suppress(FileNotFoundError):  # another took it for abandoned before it was locked
            mark = os.open(new, os.O_RDONLY)
            fcntl.flock(mark, fcntl.LOCK_EX)
            if new.exists():
                return new, mark
            os.close(mark)


def _named_first(new: Path, folder: Path) -> bool:
    """Give the new folder its name; whether that could be done before anybody else made one of that name."""
    try:
        new.rename(folder)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return False
    return True


def _replace(folder: Path, new: Path, replaced: tuple[str, ...]) -> None:
    for path in new.iterdir():
        if (folder / path.name).is_dir():
            raise IsADirectoryError(f"there is a folder {folder / path.name}")
    if not (new.parent == folder.parent and _linked_the_rest(folder, new, replaced) and _exchanged(folder, new)):
        _move_in(folder, new, replaced)


def _may_be_renamed(folder: Path) -> bool:
    here = Path.cwd()
    return (
        not os.path.ismount(folder)
        and folder not in (here, *here.parents)
        and os.access(folder.parent, os.W_OK)
        and not any(path.is_dir() and not path.name.endswith(UNFINISHED) for path in folder.iterdir())
    )


def _linked_the_rest(folder: Path, new: Path, replaced: tuple[str, ...]) -> bool:
    """Link into the new folder the files of the old that are no part of a checkpoint; whether that could be done."""
    try:
        shutil.copymode(folder, new)
        for path in folder.iterdir():
            if not _is_one_of(replaced, path.name) and not (new / path.name).exists():
                os.link(path, new / path.name, follow_symlinks=False)
    except OSError:
        return False
    return True


def _exchanged(folder: Path, new: Path) -> bool:
    """Exchange two folders' names in one call; whether this system, and this file system, can."""
    libc, names = ctypes.CDLL(None, use_errno=True), (os.fsencode(folder), os.fsencode(new))
    if hasattr(libc, "renameat2"):  # Linux: from the working directory (-100), RENAME_EXCHANGE (2)
        return libc.renameat2(-100, names[0], -100, names[1], 2) == 0
    if hasattr(libc, "renamex_np"):  # macOS: RENAME_SWAP (2)
        return libc.renamex_np(*names, 2) == 0
    return False


def _move_in(folder: Path, new: Path, replaced: tuple[str, ...]) -> None:
    names = {path.name for path in new.iterdir()}
    old = folder / CONFIG
    same_shape = old.is_file() and old.read_bytes() == (new / CONFIG).read_bytes()
    if not (same_shape and SAFETENSORS in names):
        old.unlink(missing_ok=True)
    for name in sorted(names, key=lambda name: (name == CONFIG, name != SAFETENSORS)):
        if name == CONFIG:
            _remove(replaced, folder, but=names)
        os.replace(new / name, folder / name)


def _remove(replaced: tuple[str, ...], folder: Path, but: set[str]) -> None:
    for path in folder.iterdir():
        if _is_one_of(replaced, path.name) and path.name not in but:
            path.unlink()


def _is_one_of(patterns: tuple[str, ...], name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _remove_abandoned(beside: Path, name: str) -> None:
    """Remove what a process that was killed has left of saving to this name."""
    for path in beside.glob(f".{glob.escape(name[:100])}.{'?' * 12}{UNFINISHED}"):
        with suppress(OSError):
            mark = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(mark)


def _flush(path: Path) -> None:
    """Bring a file, or a folder's list of files, to the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
