"""What decides a result, as digests: it counts only for the settings, texts, code and weights that it came from."""

import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import minigpt
from minigpt.checkpoint import locate
from minigpt.checkpoint.locate import MODEL_FILES, PICKLED_FILES
from minigpt.norms.foreign.construct import source_file
from minigpt.norms.foreign.locate import file_of
from minigpt.norms.foreign.locate import locate as locate_norm

PACKAGES = ("torch", "transformers", "accelerate", "peft", "lm_eval")


def fingerprint(settings: dict[str, Any]) -> str:
    """Return 16 digits that stand for settings of JSON's types."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def contents(model: str, norm: str | None, files: Iterable[str | None]) -> dict[str, str]:
    """Return the digests of a checkpoint's files, of the file that a norm is written in, and of texts or code.

    Args:
        files: each a path, "path.py:name", or the name of a dataset, which has no digest.
    """
    found = {f"model {model}": _of_checkpoint(model)}
    if norm is not None and (written := file_of(norm) or source_file(locate_norm(norm))):
        found[f"norm {norm}"] = _digest(Path(written))
    for file in filter(None, files):
        if (path := file_of(file) or Path(file)).is_file():
            found[file] = _digest(path)
    return found


def versions() -> dict[str, str]:
    """Return the versions of minigpt and of the packages that figures depend on, as far as they are installed."""
    installed = {one.metadata["Name"].replace("-", "_"): one.version for one in importlib.metadata.distributions()}
    return {"minigpt": minigpt.__version__} | {name: installed[name] for name in PACKAGES if name in installed}


def _of_checkpoint(model: str) -> str:
    place = locate(model)
    folder = place if place.is_dir() else place.parent
    wanted = (*MODEL_FILES, *PICKLED_FILES)
    files = {file for file in folder.iterdir() if any(fnmatchcase(file.name, pattern) for pattern in wanted)}
    if place.is_file():
        files = {file for file in files if file.suffix == ".json"} | {place}
    return fingerprint({file.name: _digest(file) for file in files})


def _digest(file: Path) -> str:
    about = file.stat()
    return _of_bytes(file.resolve(), about.st_size, about.st_mtime_ns)


@functools.cache
def _of_bytes(file: Path, size: int, written: int) -> str:
    """Return the digest of a file as it is at this size and time, so that cells of one study read it once."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
