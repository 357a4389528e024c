"""An engine: another program that computes logits of ids, from a file of its own.

B batch, T tokens, V vocabulary.
"""

import contextlib
import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from minigpt.errors import CheckpointError, ConfigError, GenerationError, MiniGPTError, raised, to_install

MOST_REASON = 300  # characters of what a program says
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # colours of a terminal
FLOATS = ("float16", "float32", "float64")

TextLogits = Float[np.ndarray, "seq vocab"]
StepFunction = Callable[[list[int]], TextLogits]
"""A function of the next ids of a text (T) to their logits (T, V), or to the logits of the last one (1, V)."""


class Engine(ABC):
    """A causal language model in a file of another program. A call takes ids (B, T) and returns logits (B, T, V).

    Args:
        file: the file or the folder.
        package: the name of the package that computes; program: what it is called, where that is another name.

    Attributes:
        settings: what changes numbers or time, in the program's own words, as it is in force.
        vocab_size, context: how many tokens the model knows, and reads at once; None if the file does not say.
        by_one: whether it reads a text with its cache, one token at a time.
    """

    vocab_size: int | None = None
    context: int | None = None
    by_one: bool = False

    def __init__(self, file: str | Path, package: str, program: str | None = None) -> None:
        self.file = Path(file)
        self.program = f"{package} {_version(package)}"
        if program is not None:
            self.program = f"{program} ({self.program})"
        self.settings: dict[str, Any] = {}

    @property
    def name(self) -> str:
        """The name of the model in a report."""
        return str(self.file)

    @property
    def note(self) -> str:
        """A sentence that says which program computes, and by which settings."""
        settings = [f"{name} {value}" for name, value in self.settings.items()]
        return f"{self.program} computes it, with {', '.join(settings)}."

    def __call__(self, input_ids: Any) -> Float[Tensor, "batch seq vocab"]:
        """Return logits (B, T, V) of ids (B, T), each row read by itself, from nothing.

        Args:
            input_ids: whole numbers, as a tensor, an array or lists.

        Raises:
            GenerationError: if they are not rows of ids, or are more than the model reads.
            CheckpointError: if the program cannot read them, or does not give logits of every position.
        """
        ids = _ids_of(input_ids)
        rows = [torch.from_numpy(self.whole(row)) for row in ids.tolist()]
        return torch.stack(rows).to(ids.device)

    def whole(self, ids: list[int]) -> TextLogits:
        """Return the logits (T, V) of a text that is read at once.

        Raises:
            GenerationError, CheckpointError: as a call.
        """
        self._check(ids)
        with self.reading(ids):
            step = self._begun(ids) if self.by_one else None
            logits = self._whole(ids) if step is None else step(ids)
        return self._checked(logits, len(ids))

    def start(self, ids: list[int]) -> StepFunction | None:
        """Return a function that reads a new text piece by piece with the program's own cache; None without one.

        It returns the logits of the last token of a piece (1, V).

        Args:
            ids: the text, as far as it is known. The pieces are the text from its beginning, and may go on beyond it.

        Raises:
            GenerationError, CheckpointError: as a call.
        """
        self._check(ids)
        with self.reading(ids):
            step = self._begun(ids)
        if step is None:
            return None

        def read(piece: list[int]) -> TextLogits:
            with self.reading(ids):
                logits = step(piece)[-1:]
            return self._checked(logits, 1)

        return read

    def _begun(self, ids: list[int]) -> StepFunction | None:
        step = self._start(ids)
        if step is None or not self.by_one:
            return step
        return lambda piece: np.concatenate([step([token]) for token in piece])

    @abstractmethod
    def _whole(self, ids: list[int]) -> Any:
        """Return what the program computes of a text: logits (T, V)."""

    def _start(self, ids: list[int]) -> StepFunction | None:
        """Return a function that reads a new text piece by piece; None if the program keeps no cache."""
        return None

    def _check(self, ids: list[int]) -> None:
        """Check that a text fits the context and the vocabulary, as far as the file says what they are."""
        if self.context is not None and len(ids) > self.context:
            raise GenerationError(f"{self.file} reads {self.context:,} tokens at most, and a text has {len(ids):,}")
        least = min(ids)
        most = max(ids)
        known = self.vocab_size or most + 1
        if least < 0 or most >= known:
            raise GenerationError(f"must be from 0 to {known - 1}, got {least} to {most}", argument="input_ids")

    def _checked(self, logits: Any, tokens: int) -> TextLogits:
        """Return logits (T, V) after a look at their shape and dtype."""
        logits = np.asarray(logits)
        if logits.ndim == 2 and len(logits) == 1 and tokens > 1:
            raise CheckpointError(
                f"{self.file} gives the logits of the last position only, and parity needs the logits of all {tokens}"
            )
        if logits.ndim != 2 or len(logits) != tokens or logits.dtype.name not in FLOATS:
            got = f"{logits.shape} and {logits.dtype.name}"
            needed = f"must give logits ({tokens}, V) of {tokens} tokens in a floating dtype"
            raise CheckpointError(f"{self.file} {needed}, got {got}")
        return logits

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Turn what the program raises in the block into a CheckpointError that names the file."""
        with self._naming(f"{self.program} cannot open {self.file}"):
            yield

    @contextlib.contextmanager
    def reading(self, ids: list[int]) -> Iterator[None]:
        """Turn what the program raises in the block into a CheckpointError that names the length of the text."""
        with self._naming(f"{self.program} cannot read a text of {len(ids)} tokens with {self.file}"):
            yield

    @contextlib.contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        try:
            yield
        except MiniGPTError:
            raise
        except raised() as error:
            raise CheckpointError(f"{what}: {reason_of(error)}") from error


def _ids_of(input_ids: Any) -> Int[Tensor, "batch seq"]:
    """Return rows of ids as a tensor.

    Raises:
        GenerationError: if they are something else.
    """
    try:
        ids = torch.as_tensor(input_ids)
    except (ValueError, TypeError) as error:
        raise GenerationError(f"must be ids of shape (B, T): {error}", argument="input_ids") from error
    is_whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if ids.ndim != 2 or 0 in ids.shape or not is_whole:
        got = f"{tuple(ids.shape)} and {ids.dtype}"
        raise GenerationError(f"must be ids of shape (B, T), got {got}", argument="input_ids")
    return ids


def reason_of(error: BaseException) -> str:
    """Return what a program says of an error, in one line."""
    words = " ".join(ESCAPES.sub("", str(error)).split())
    return (words or type(error).__name__)[:MOST_REASON]


@contextlib.contextmanager
def naming_option(name: str, value: Any) -> Iterator[None]:
    """Turn what a program raises as an option is set in the block into a ConfigError."""
    try:
        yield
    except raised() as error:
        raise ConfigError(f"cannot be {value!r}: {reason_of(error)}", argument=name) from error


def load_package(package: str, extra: str, *, needs: str | None = None) -> Any:
    """Import the package of an engine.

    Raises:
        ConfigError: if it is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = needs or package
        message = f"a file of {extra} needs {name}, which is not installed; {to_install(extra)}"
        raise ConfigError(message) from error


def check_exists(file: str | Path, *, is_folder: bool = False) -> Path:
    """Return the path of a model that exists.

    Raises:
        CheckpointError: if there is none, or it is a folder in place of a file, or the reverse.
    """
    path = Path(file)
    kind = "folder" if is_folder else "file"
    if not path.exists():
        raise CheckpointError(f"cannot read {path}: there is no such {kind}")
    if path.is_dir() != is_folder:
        raise CheckpointError(f"{path} must be a {kind}")
    return path


def _version(package: str) -> str:
    try:
        return version(package.replace("_", "-"))
    except PackageNotFoundError:
        return "of an unknown version"
