"""Text, JSON and JSON lines in files: one sentence if a file cannot be read, and no half of one is ever written."""

import codecs
import contextlib
import errno
import functools
import hashlib
import json
import math
import os
import platform
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from minigpt.errors import MiniGPTError

JSON_LINES = (".jsonl", ".ndjson", ".json")  # ends of names
BYTE_ORDER_MARKS = {  # the longer first
    codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32", codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}  # fmt: skip
PARTIAL = ".partial"  # ends the name of a temporary file
FOLDER = "minigpt-"  # begins the name of a temporary folder
LOCK = f".minigpt.{platform.node()}.lock"  # the file in it that is locked, by a process of this machine
POLL_SECONDS = 0.01  # between two looks at a lock that another process holds
_temporaries: set[Path] = set()  # of this process, as long as they may be there


def as_path(value: str | os.PathLike[str], argument: str, kind: type[MiniGPTError]) -> Path:
    """Return the path that a caller names.

    Raises:
        MiniGPTError: of the given kind, if it is empty, holds NUL, or is not a path.
    """
    if not isinstance(value, str | os.PathLike) or not str(value) or "\0" in str(value):
        raise kind(f"must be a path, got {value!r:.100}", argument=argument)
    return Path(value)


def require_file(path: str | os.PathLike[str], kind: type[MiniGPTError]) -> None:
    """Check that a file is there, and may be read.

    Raises:
        MiniGPTError: of the given kind, if it is missing, is a folder, or permission is denied.
    """
    try:
        open(path, "rb").close()
    except (OSError, ValueError) as error:  # ValueError: NUL in a path
        raise kind(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def read_object(path: Path, kind: type[MiniGPTError]) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        MiniGPTError: of the given kind, if the file cannot be read or does not contain a JSON object.
    """
    try:
        return parse_object(path.read_bytes())
    except OSError as error:
        raise kind(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        raise kind(f"{path} is not a JSON object: {error}") from error


def parse_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object in the bytes.

    Raises:
        ValueError: if they are not JSON.
        TypeError: if they are JSON, but not an object.
    """
    try:
        fields = json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(fields, dict):
        raise TypeError(f"it is a {type(fields).__name__}")
    return fields


def finite(value: Any, instead: Callable[[float], Any] = lambda number: None) -> Any:
    """Return the value with every number that is not finite replaced by ``instead`` of it, by default None."""
    if isinstance(value, dict):
        return {key: finite(item, instead) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item, instead) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return instead(value)
    return value


def read_text(file: Path, kind: type[MiniGPTError] = MiniGPTError) -> str:
    """Return the text of a file with its line ends as they are, without a byte order mark.

    Raises:
        MiniGPTError: of the given kind, if the file cannot be read or is not UTF-8 text.
    """
    try:
        return file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise kind(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise kind(not_utf8(file, error)) from error


def not_utf8(what: object, error: UnicodeDecodeError) -> str:
    """Return the sentence that says where a text is not UTF-8, and how to make it so."""
    byte = error.object[error.start]
    problem = f"{what} is not UTF-8 text: byte 0x{byte:02x} at {error.start:,}"
    for mark, name in BYTE_ORDER_MARKS.items():
        if error.object.startswith(mark):
            return f"{problem}; it begins as {name} does; convert it with iconv -f {name} -t UTF-8"
    return f"{problem}; convert it first, e.g. Latin-1 with iconv -f LATIN1 -t UTF-8"


def is_json_lines(file: Path, content: str) -> bool:
    """Return whether a file holds JSON objects, one a line, by its name, or by the "text" of its first line."""
    if file.suffix.lower() in JSON_LINES:
        return True
    first = content.lstrip().partition("\n")[0]
    try:
        return "text" in parse_object(first.encode())
    except (ValueError, TypeError):
        return False


def hash_json(value: Any) -> str:
    """Return a value of JSON's types as a hash of 16 hexadecimal digits; other types count as their ``str``."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def hash_file(path: str | Path) -> str:
    """Return the SHA-256 of a file's content. An unchanged file is read once in a process.

    Raises:
        OSError: if it cannot be read.
    """
    path = Path(path).resolve()
    return _hash_content(path, file_state(path))


@functools.cache
def _hash_content(path: Path, _state: tuple[int, ...] | None) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def file_state(path: Path) -> tuple[int, ...] | None:
    """Return what changes when a file is written: its number, size and time. None if there is no such file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write a file whole or not at all: a process that is killed leaves the old content or the new.

    Raises:
        OSError: if it cannot be written. The old content stays.
    """
    if isinstance(content, str):
        content = content.encode()
    with replaced(path) as new:
        new.write_bytes(content)


@contextlib.contextmanager
def replaced(path: str | Path) -> Iterator[Path]:
    """Yield a file to write, which replaces the one at ``path`` when the block ends without an error.

    It is a temporary file in the same folder. It is flushed to the disk, and takes the name in one rename. A link stays
    a link, and a new file has the mode that the umask gives it, whatever writes it. Anything but a regular file, as
    ``/dev/stdout``, gets the content at the end.

    Raises:
        OSError: if it cannot be written.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        with tempfile.TemporaryDirectory() as folder:
            new = Path(folder) / path.name
            yield new  # what writes it may put another file in its place
            with new.open("rb") as content, path.open("wb") as device:
                shutil.copyfileobj(content, device)
        return
    with temporary(path.parent, path.name) as new:
        mode = (path if path.exists() else new).stat().st_mode
        yield new
        new.chmod(mode)
        flush(new)
        new.replace(path)
    flush(path.parent)
    remove_left(path.parent, path.name)


@contextlib.contextmanager
def temporary(folder: Path, name: str, make: Callable[[Path], None] = Path.touch) -> Iterator[Path]:
    """Yield a new temporary file in ``folder``, or what ``make`` makes there; it is removed at the end, if still there.

    Its name, ``.NAME.*.partial``, is unique, and it is locked.

    Raises:
        OSError: if it cannot be made.
    """
    new = folder / f".{name}.{secrets.token_hex(6)}{PARTIAL}"
    with contextlib.ExitStack() as stack:
        while not new.exists():  # ``remove_left`` of another process may remove it before it is locked
            _temporaries.add(new)
            stack.callback(_temporaries.discard, new)
            make(new)
            stack.callback(remove, new)
            with contextlib.suppress(OSError):  # a file system without locks
                stack.enter_context(locked(new))
        yield new


def is_temporary(file_name: str, name: str) -> bool:
    """Return True for the name of a temporary file, or folder, that ``temporary`` made for ``name``."""
    return file_name.startswith(f".{name}.") and file_name.endswith(PARTIAL)


def remove_left(folder: Path, name: str) -> None:
    """Remove the temporary files of this name that killed processes have left: those that nobody holds a lock on."""
    for path in folder.iterdir():
        if is_temporary(path.name, name):
            with contextlib.suppress(OSError), locked(path):
                remove(path)


class TemporaryFolder:
    """A folder for temporary files, which goes with this object, and when the process ends or is interrupted.

    A process that is killed leaves it. The next such folder that its user makes removes it: the file ``LOCK`` in it is
    locked as long as its process lives.

    Args:
        name: begins the folder's name.

    Attributes:
        path: of the folder, in the system's folder for temporary files.
    """

    def __init__(self, name: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{FOLDER}{name}-"))
        _temporaries.add(self.path)
        self._locks = contextlib.ExitStack()
        weakref.finalize(self, _forget, self.path, self._locks)
        new = self.path / f"{LOCK}{PARTIAL}"
        new.touch()
        with contextlib.suppress(OSError):  # a file system without locks, where a killed process leaves its folder
            self._locks.enter_context(locked(new))
            new.rename(self.path / LOCK)  # it is locked whenever it has this name
        remove_left_folders(self.path.parent, self.path.stat().st_uid)


def _forget(path: Path, locks: contextlib.ExitStack) -> None:
    """Remove a temporary folder, as far as it is there."""
    with contextlib.suppress(OSError):
        remove(path)
    locks.close()
    _temporaries.discard(path)


def remove_left_folders(folder: Path, user: int) -> None:
    """Remove the temporary folders that killed processes of a user have left, whose lock nobody holds."""
    for path in folder.glob(f"{FOLDER}*"):
        lock = path / LOCK
        with contextlib.suppress(OSError):
            owners = {path.lstat().st_uid, lock.lstat().st_uid}
            if path.is_symlink() or lock.is_symlink() or owners != {user}:
                continue
            with locked(lock):
                remove(path)


def remove_temporaries() -> None:
    """Remove the temporary files of this process, which ends at once; another of its threads may still write them.

    Each gets another name first. So that thread cannot make it current while parts of it are gone already.
    """
    for path in [*_temporaries]:
        with contextlib.suppress(OSError):
            ended = path.with_suffix(f".ended{PARTIAL}")
            path.rename(ended)
            remove(ended)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold an exclusive lock on a file or folder. It ends with the block, or with the process.

    Args:
        wait: wait for the process that holds it.

    Raises:
        BlockingIOError: if another process holds it.
        OSError: if the file is not there, or its file system has no locks.
    """
    from filelock import lock_descriptor  # imported here: the shell's options need no lock

    descriptor = os.open(path, os.O_RDONLY)
    try:
        if not lock_descriptor(descriptor, blocking=wait, poll_interval=POLL_SECONDS):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(path))
        yield
    finally:
        os.close(descriptor)


def flush(path: Path) -> None:
    """Flush a file, or a folder's list of files, to the disk.

    Raises:
        OSError: if that fails.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Lines:
    """A file of JSON objects, one a line, that belongs to one run. A run that is started again goes on with it.

    Each line begins with the run's fingerprint, ``{"run": "..."``. A kill can tear the last line: it is cut off when
    the file is opened again. The file is locked until ``close``. Lines end at a newline, and at no other character.

    Args:
        path: is created if it does not exist. A pipe or a device has no earlier rows.
        fingerprint: what decides the rows, e.g. ``hash_json`` of the settings. None if one file has rows of
            several runs, which the caller distinguishes.
        kind: of the errors.

    Attributes:
        rows: what the file holds, in its order, without the fingerprint.
        torn: the number of the line that was cut off, from 1, or None.

    Raises:
        MiniGPTError: of the given kind, if the file cannot be written, another process has it open, it has lines of
            another run, or a line is damaged. The file is unchanged then.
    """

    def __init__(
        self, path: str | Path, fingerprint: str | None = None, kind: type[MiniGPTError] = MiniGPTError
    ) -> None:
        self.path, self.kind = Path(path), kind
        self.rows: list[dict[str, Any]] = []
        self.torn: int | None = None
        self._run = {} if fingerprint is None else {"run": fingerprint}
        try:
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115  (``close`` closes it)
        except (OSError, ValueError) as error:  # ValueError: NUL in a path
            raise kind(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
        try:
            if self.path.is_file():
                self._read()
        except MiniGPTError:
            self.close()
            raise

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row. A number that is not finite is written as null.

        Raises:
            MiniGPTError: if it cannot be written, as on a full disk, where the earlier rows stay; or if the file was
                removed.
        """
        state = os.fstat(self._file.fileno())
        if state.st_nlink == 0:
            raise self.kind(f"{self.path} was removed while it was written; its {len(self.rows)} rows are lost")
        line = json.dumps(finite({**self._run, **row}), ensure_ascii=False, allow_nan=False) + "\n"
        data = line.encode(errors="backslashreplace")  # a lone surrogate as JSON writes it
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(state.st_size)
            raise self.kind(
                f"cannot write {self.path}: {error.strerror}; the {len(self.rows)} rows before stay, and the same "
                "command goes on from there"
            ) from error
        self.rows.append(dict(row))

    def close(self) -> None:
        """Close the file, which ends the lock."""
        self._file.close()

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        self._lock()
        self._file.seek(0)
        *lines, rest = self._file.read().split(b"\n")
        self.rows = [self._parsed(number, line) for number, line in enumerate(lines, start=1)]
        if rest:
            self.torn = len(lines) + 1
            self._require_own(self.torn, rest.rstrip(b"\0"))  # a power cut may leave zeros
            self._file.truncate(self._file.tell() - len(rest))

    def _lock(self) -> None:
        from filelock import lock_descriptor

        is_ours = True
        with contextlib.suppress(OSError):  # a file system without locks
            is_ours = lock_descriptor(self._file.fileno(), blocking=False)
        if not is_ours:
            raise self.kind(f"another process is writing {self.path}")

    def _parsed(self, number: int, line: bytes) -> dict[str, Any]:
        self._require_own(number, line)
        try:
            row = parse_object(line)
        except (ValueError, TypeError) as error:
            raise self.kind(
                f"line {number} of {self.path} is damaged: {error}; remove the line, and what it held is done again"
            ) from error
        return {name: value for name, value in row.items() if name not in self._run}

    def _require_own(self, number: int, line: bytes) -> None:
        start = json.dumps(self._run).encode().removesuffix(b"}")  # {"run": "...", or {
        if line[: len(start)] != start[: len(line)]:
            raise self.kind(
                f"line {number} of {self.path} is of another run, with other settings, texts or weights, or of none; "
                "write to another file"
            )


def write_json(path: Path, fields: Mapping[str, object]) -> None:
    """Write fields as readable JSON.

    Raises:
        OSError: if that fails.
    """
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
