"""Prompts from a file and results to a file, so that a run that was killed can continue where it stopped.

A file of prompts has one prompt a line: plain text, or JSON of which only the prompt is required:

    {"prompt": "...", "id": ..., "max_new_tokens": ..., "seed": ...}

It is JSON if its name ends in .jsonl or its first line starts with "{". Each result begins with the fingerprint of its
run, so that no run continues the file of another.
"""

import codecs
import fcntl
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from minigpt.errors import GenerationError
from minigpt.files import not_utf8, parse_object
from minigpt.generation.decode import Completion, Prompt
from minigpt.model import GPT2

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
        raise GenerationError(f"{file} has no prompt; write one on each line")
    is_json = str(file).endswith(".jsonl") or next(iter(lines.values())).lstrip().startswith(b"{")
    return [_parsed(number, line, f"{file}, line {number}", is_json) for number, line in lines.items()]


def _parsed(number: int, line: bytes, origin: str, is_json: bool) -> PromptLine:
    try:
        fields: dict[str, Any] = parse_object(line) if is_json else {"prompt": line.decode("utf-8")}
    except UnicodeDecodeError as error:
        raise GenerationError(not_utf8(origin, error)) from error
    except (ValueError, TypeError) as error:
        raise GenerationError(f'{origin}: not a JSON object ({error}); write {{"prompt": ...}} on each line') from error
    if not isinstance(fields.get("prompt"), str):
        raise GenerationError(f'{origin}: "prompt" must be a text')
    if unknown := sorted(fields.keys() - set(FIELDS)):
        raise GenerationError(f"{origin}: unknown {', '.join(unknown)}; known are {', '.join(FIELDS)}")
    prompt = Prompt(fields["prompt"], fields.get("max_new_tokens"), fields.get("seed"), origin)
    return PromptLine(number, fields.get("id"), prompt)


def fingerprint(model: GPT2, prompts: list[PromptLine], settings: Mapping[str, Any]) -> str:
    """Return a hash of the run: its prompts, its settings, the model's config and a sample of each weight."""
    weights = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        some = tensor.flatten()[:: tensor.numel() // SAMPLE | 1]  # an odd step, so that the sample covers all columns
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
            self._file: BinaryIO = open(file, "a+b", buffering=0)  # noqa: SIM115  (closed by __exit__)
        except OSError as error:
            raise GenerationError(f"cannot write {file}: {error.strerror}") from error
        if self.path.is_file():  # a pipe or a device has no earlier results
            self._read_earlier_results()

    def add(self, line: PromptLine, result: Completion) -> None:
        """Write a result.

        Raises:
            GenerationError: if the disk is full; earlier results are kept.
        """
        fields = {"run": self.run, "line": line.line, "number": result.number}
        fields |= {"id": line.id} if line.id is not None else {}
        fields |= {"prompt": line.prompt.text, "text": result.text, "end": result.end, "tokens": len(result.ids)}
        fields |= {"logprobs": result.logprobs} if result.logprobs is not None else {}
        data = json.dumps(fields, ensure_ascii=False).encode() + b"\n"
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise GenerationError(
                f"cannot write {self.path}: {error.strerror}; the {len(self.done)} results before are kept, "
                "and the same command goes on from there"
            ) from error
        self.done.add((line.line, result.number))

    def __enter__(self) -> "ResultFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _read_earlier_results(self) -> None:
        """Read the places of the results; remove the start of one that was cut short."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise GenerationError(f"another run is writing {self.path}") from error
        self._file.seek(0)
        *lines, rest = self._file.read().split(b"\n")
        start = json.dumps({"run": self.run})[:-1].encode()
        if not (all(line.startswith(start) for line in lines) and rest[: len(start)] == start[: len(rest)]):
            raise GenerationError(
                f"{self.path} has lines of another run, with other prompts, settings or weights, or of none; "
                "give another --out"
            )
        results = map(json.loads, lines)
        self.done = {(result["line"], result["number"]) for result in results}
        if rest:
            self._file.truncate(self._file.tell() - len(rest))
            self.note = f"line {len(lines) + 1} of {self.path} was cut short; its text is written again"
