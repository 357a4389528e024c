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
from minigpt.norms.foreign.locate import locate as located

PACKAGES = ("torch", "transformers", "accelerate", "peft", "lm_eval")


def fingerprint(settings: dict[str, Any]) -> str:
    """Return 16 digits that stand for settings of JSON's types."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def contents(model: str, code: Iterable[str | None], files: Iterable[str | None]) -> dict[str, str]:
    """Return the digests of a checkpoint's files, of the files that code is written in, and of texts.

    Args:
        code: norms and metrics, each as ``norms.foreign.locate`` takes it.
        files: each a path, or the name of a dataset, which has no digest.
    """
    place, wanted = locate(model), (*MODEL_FILES, *PICKLED_FILES)
    folder = place if place.is_dir() else place.parent
    weights = [file for file in folder.iterdir() if any(fnmatchcase(file.name, pattern) for pattern in wanted)]
    if place.is_file():
        weights = [place, *(file for file in weights if file.suffix == ".json")]
    found = {f"model {model}": fingerprint({file.name: _digest(file) for file in weights})}
    for name in filter(None, code):
        if written := file_of(name) or source_file(located(name)):
            found[name] = _digest(Path(written))
    return found | {file: _digest(Path(file)) for file in filter(None, files) if Path(file).is_file()}


def versions() -> dict[str, str]:
    """Return the versions of minigpt and of the packages that figures depend on, as far as they are installed."""
    installed = {one.metadata["Name"].replace("-", "_"): one.version for one in importlib.metadata.distributions()}
    return {"minigpt": minigpt.__version__} | {name: installed[name] for name in PACKAGES if name in installed}


def _digest(file: Path) -> str:
    about = file.stat()
    return _of_bytes(file.resolve(), about.st_size, about.st_mtime_ns)


@functools.cache
def _of_bytes(file: Path, size: int, written: int) -> str:
    """Return the digest of a file as it is at this size and time, so that cells of one study read it once."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
