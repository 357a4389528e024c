"""Prompts from a file and results to a file, so that a run that was killed goes on where it ended.

A file of prompts has one prompt a line: plain text, or JSON of which only the prompt is required:

    {"prompt": "...", "id": ..., "max_new_tokens": ..., "seed": ...}

It is JSON if its name ends in .jsonl or its first line starts with "{". Each result begins with the fingerprint of its
run, so that no run continues the file of another.
"""

import codecs
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from minigpt.engine import GPT2
from minigpt.errors import GenerationError
from minigpt.generation.complete import Completion, Prompt
from minigpt.generation.settings import RANGES
from minigpt.json_file import parse_object

SAMPLE = 1024  # values of each weight, at least, that go into the fingerprint

FIELDS = ("prompt", "id", "max_new_tokens", "seed")


class PromptLine(NamedTuple):
    """A prompt and its line."""

    line: int  # from 1
    id: Any  # the user's name for it, or None
    prompt: Prompt


def read_prompts(file: str | Path) -> list[PromptLine]:
    """Return the prompts of a file, one a line, plain or JSON. Empty lines are skipped.

    Raises:
        GenerationError: if the file cannot be read, has no prompt, or a line is invalid; the message names the line.
    """
    try:
        data = Path(file).read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise GenerationError(f"cannot read {file}: {error.strerror}") from error
    lines = {number: line.removesuffix(b"\r") for number, line in enumerate(data.split(b"\n"), start=1) if line.strip()}
    if not lines:
        raise GenerationError(f"{file} holds no prompt; write one on each line")
    is_json = str(file).endswith(".jsonl") or next(iter(lines.values())).lstrip().startswith(b"{")
    return [(_from_json if is_json else _from_text)(file, number, line) for number, line in lines.items()]


def _from_text(file: str | Path, number: int, line: bytes) -> PromptLine:
    try:
        return PromptLine(number, None, Prompt(line.decode("utf-8"), origin=f"{file}, line {number}"))
    except UnicodeDecodeError as error:
        raise GenerationError(f"{file}, line {number}: not UTF-8 text: {error}") from error


def _from_json(file: str | Path, number: int, line: bytes) -> PromptLine:
    try:
        fields = parse_object(line)
    except ValueError as error:
        raise GenerationError(
            f'{file}, line {number}: not JSON in UTF-8 ({error}); write {{"prompt": ...}} on each line'
        ) from error
    except TypeError:
        fields = {}
    if reason := _fault(fields):
        raise GenerationError(f"{file}, line {number}: {reason}")
    prompt = Prompt(fields["prompt"], fields.get("max_new_tokens"), fields.get("seed"), f"{file}, line {number}")
    return PromptLine(number, fields.get("id"), prompt)


def _fault(fields: dict[str, Any]) -> str | None:
    if not isinstance(fields.get("prompt"), str):
        return 'not an object with a text as its "prompt"'
    if unknown := sorted(fields.keys() - set(FIELDS)):
        return f"unknown {', '.join(unknown)}; known are {', '.join(FIELDS)}"
    for name in ("max_new_tokens", "seed"):
        fits, requirement = RANGES[name]
        if fields.get(name) is not None and not fits(fields[name]):
            return f"{name} must {requirement}, not {fields[name]!r}"
    try:
        _written(fields.get("id"))
    except ValueError:
        return "its id holds what JSON in UTF-8 cannot: NaN, infinity or half a character"
    return None


def _written(fields: Any) -> bytes:
    return json.dumps(fields, ensure_ascii=False, allow_nan=False).encode("utf-8")


def fingerprint(model: GPT2, prompts: list[PromptLine], settings: Mapping[str, Any]) -> str:
    """Return a hash of the run: its prompts, its settings, the model's config and a sample of each weight."""
    weights = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        some = tensor.flatten()[:: tensor.numel() // SAMPLE | 1]  # odd, so that the sample has all columns
        weights.update(f"{name} {tensor.dtype} {some.tolist()}".encode())
    what = [[list(line) for line in prompts], dict(settings), model.config.to_dict(), weights.hexdigest()]
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:16]


class ResultFile:
    """The results of one run, appended as whole lines. A context manager.

    Args:
        file: where to write. Results of the same run that it already has are kept.
        run: the run's fingerprint.

    Attributes:
        done: (line, number) of the results that the file has.
        note: something that the user should know about the file, or None.

    Raises:
        GenerationError: if the file cannot be written, another process writes it, or it has anything but results of
            this run; the file is unchanged then.
    """

    def __init__(self, file: str | Path, run: str) -> None:
        self.path, self.run = Path(file), run
        self.done: set[tuple[int, int]] = set()
        self.note: str | None = None
        try:
            # A pipe opened for reading too would stay open after its reader has gone.
            mode = "ab" if self.path.exists() and not self.path.is_file() else "a+b"
            self._file: BinaryIO = open(file, mode, buffering=0)  # noqa: SIM115  (closed by __exit__)
        except OSError as error:
            raise GenerationError(f"cannot write {file}: {error.strerror}") from error
        try:
            self._take_up()
        except BaseException:
            self._file.close()
            raise

    def add(self, line: PromptLine, result: Completion) -> None:
        """Write a result, whole or not at all.

        Raises:
            GenerationError: if the disk is full or the reader of a pipe has gone; earlier results are kept.
        """
        fields = {"run": self.run, "line": line.line, "number": result.number}
        fields |= {"id": line.id} if line.id is not None else {}
        fields |= {"prompt": line.prompt.text, "text": result.text, "end": result.end, "tokens": len(result.ids)}
        fields |= {"logprobs": result.logprobs} if result.logprobs is not None else {}
        self._write(_written(fields) + b"\n")
        self.done.add((line.line, result.number))

    def __enter__(self) -> "ResultFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _write(self, data: bytes) -> None:
        before = os.fstat(self._file.fileno()).st_size
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            if self._is_regular():
                self._file.truncate(before)
            raise GenerationError(
                f"cannot write {self.path}: {error.strerror}; the {len(self.done)} results before are kept, "
                "and the same command goes on from there"
            ) from error

    def _is_regular(self) -> bool:
        return stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)

    def _take_up(self) -> None:
        if not self._is_regular():  # a pipe or a device has no earlier results
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise GenerationError(f"{self.path} is being written by another run") from error
        self._file.seek(0)
        *whole, rest = self._file.read().split(b"\n")
        for number, line in enumerate(whole, start=1):
            self.done.add(self._known(number, line))
        if rest:
            self._cut(rest, len(whole) + 1)

    def _known(self, number: int, line: bytes) -> tuple[int, int]:
        """Return the (line, number) of a result of this run."""
        try:
            fields = json.loads(line)
            run, *of = fields["run"], fields["line"], fields["number"]
            if not all(type(place) is int for place in of):
                raise TypeError("line and number must be whole numbers")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise GenerationError(
                f"{self.path}, line {number}: not a result of this command; give another --out"
            ) from error
        if run != self.run:
            raise GenerationError(
                f"{self.path} holds results of another run, of other prompts, settings or weights; give another --out"
            )
        if tuple(of) in self.done:
            raise GenerationError(f"{self.path}, line {number}: the same result a second time; give another --out")
        return of[0], of[1]

    def _cut(self, rest: bytes, number: int) -> None:
        """Remove the start of a result that was cut short."""
        start = json.dumps({"run": self.run})[:-1].encode()
        if not (rest.startswith(start) or start.startswith(rest)):
            raise GenerationError(f"{self.path}, line {number}: not a result of this command; give another --out")
        self._file.truncate(os.fstat(self._file.fileno()).st_size - len(rest))
        self.note = f"line {number} of {self.path} was cut short; its text is written again"
