"""Prompts from a file, results to a file: one JSON object a line, and after a kill the rest of them.

A line of prompts is {"prompt": "...", "id": ..., "max_new_tokens": ..., "seed": ...}, of which only the prompt must be.
A line of results begins with the fingerprint of its run, so that no run goes on with another's.
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

SAMPLE = 1024  # values of a weight, at least, by which it is known again

FIELDS = ("prompt", "id", "max_new_tokens", "seed")


class PromptLine(NamedTuple):
    """A prompt, and where it stands."""

    line: int  # from 1
    id: Any  # the user's own name for it, None where there is none
    prompt: Prompt


def read_prompts(file: str | Path) -> list[PromptLine]:
    """The prompts of a .jsonl file; empty lines between them are none.

    Raises:
        GenerationError: the file cannot be read or holds none, or a line, named with its reason, is broken.
    """
    try:
        lines = Path(file).read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
    except OSError as error:
        raise GenerationError(f"cannot read {file}: {error.strerror}") from error
    prompts = [_parsed(file, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise GenerationError(f"{file} holds no prompt")
    return prompts


def _parsed(file: str | Path, number: int, line: bytes) -> PromptLine:
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
    own = Prompt(fields["prompt"], fields.get("max_new_tokens"), fields.get("seed"), f"{file}, line {number}")
    return PromptLine(number, fields.get("id"), own)


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
    """What tells a run from any other: the prompts, the settings, the model's shape and a thousand values or two of
    each of its weights, from one end to the other."""
    weights = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        some = tensor.flatten()[:: tensor.numel() // SAMPLE | 1]  # odd, so that all columns have a turn
        weights.update(f"{name} {tensor.dtype} {some.tolist()}".encode())
    what = [[list(line) for line in prompts], dict(settings), model.config.to_dict(), weights.hexdigest()]
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:16]


class ResultFile:
    """The results of one run, whole lines only, appended as they are finished. A context manager.

    Args:
        file: where they go. Results of the same run that are there already are kept.
        run: the run's fingerprint.

    Attributes:
        done: (line, number) of the results that are there.
        note: what was found that a user should know, or None.

    Raises:
        GenerationError: the file cannot be written, is being written, or holds anything but results of this run; it is
            as it was then.
    """

    def __init__(self, file: str | Path, run: str) -> None:
        self.path, self.run = Path(file), run
        self.done: set[tuple[int, int]] = set()
        self.note: str | None = None
        try:
            # To read what a pipe holds would keep it open when its reader has gone.
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
        """Write a result: it is there whole, or not at all.

        Raises:
            GenerationError: the disk is full, or whoever read it has gone; the results before are kept.
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
        if not self._is_regular():  # a pipe or a device: there is nothing to go on from
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
        """(line, number) of a result of this run."""
        try:
            fields = json.loads(line)
            run, *of = fields["run"], fields["line"], fields["number"]
            if not all(type(place) is int for place in of):
                raise TypeError("a place is a whole number")
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
        """Remove the beginning of a result that was never finished."""
        start = json.dumps({"run": self.run})[:-1].encode()
        if not (rest.startswith(start) or start.startswith(rest)):
            raise GenerationError(f"{self.path}, line {number}: not a result of this command; give another --out")
        self._file.truncate(os.fstat(self._file.fileno()).st_size - len(rest))
        self.note = f"line {number} of {self.path} was cut short; its text is written again"
