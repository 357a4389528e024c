"""Prompts from a file, and their texts to a file of JSON lines, so that a run that was killed can go on.

A file of prompts has one prompt a line: plain text, or JSON of which only the prompt is required:

    {"prompt": "...", "id": ...}

It is JSON if its name ends in .jsonl, .ndjson or .json, or its first line starts with "{".
The texts are in the order of the prompts.
"""

import codecs
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from minigpt.errors import GenerationError
from minigpt.files import JSON_LINES, Lines, hash_json, not_utf8, parse_object
from minigpt.generation.decode import Completion, complete_texts
from minigpt.generation.row import TextCodec
from minigpt.generation.settings import GenerationSettings
from minigpt.model import GPT2

FIELDS = {"prompt", "id"}


class PromptLine(NamedTuple):
    """A prompt and its line."""

    line: int  # from 1
    id: Any  # the user's name for it, or None
    prompt: str


def read_prompts(file: str | Path) -> list[PromptLine]:
    """Return the prompts of a file, one a line, plain or JSON. Empty lines are skipped.

    Raises:
        GenerationError: if the file cannot be read, has no prompt, or a line is invalid; the message names the line.
    """
    try:
        data = Path(file).read_bytes().removeprefix(codecs.BOM_UTF8)
    except (OSError, ValueError) as error:  # ValueError: NUL in a path
        reason = getattr(error, "strerror", None) or error
        raise GenerationError(f"cannot read {file}: {reason}") from error
    is_json = Path(file).suffix.lower() in JSON_LINES or data.lstrip().startswith(b"{")
    prompts = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            origin = f"{file}, line {number}"
            prompts.append(_parsed(number, line.removesuffix(b"\r"), origin, is_json))
    if not prompts:
        raise GenerationError(f"{file} has no prompt; write one on each line")
    return prompts


def _parsed(number: int, line: bytes, origin: str, is_json: bool) -> PromptLine:
    try:
        fields = _fields(line, is_json)
    except UnicodeDecodeError as error:
        raise GenerationError(not_utf8(origin, error)) from error
    except (ValueError, TypeError) as error:
        raise GenerationError(f'{origin}: not a JSON object ({error}); write {{"prompt": ...}} on each line') from error
    unknown = fields.keys() - FIELDS
    if "prompt" not in fields or unknown:
        raise GenerationError(
            f'{origin}: needs a text "prompt", and may have an "id" and nothing else, got {sorted(fields)}'
        )
    prompt = fields["prompt"]
    if not isinstance(prompt, str):
        raise GenerationError(f'{origin}: "prompt" must be a text, got {prompt!r:.100}')
    return PromptLine(number, fields.get("id"), prompt)


def _fields(line: bytes, is_json: bool) -> dict[str, Any]:
    """Return a line of JSON as its fields, and a plain one as the field of its prompt."""
    if is_json:
        return parse_object(line)
    return {"prompt": line.decode("utf-8")}


class TextFile:
    """The texts of a file of prompts, written as JSON lines in the order of the prompts. A context manager.

    Text j of prompt i draws with seed + i * num_return_sequences + j.

    Args:
        prompts: the file of prompts.
        out: the file of texts. Those that the same run has written before are kept.
        opened_by: the fingerprint of what opened the model. Another one, other prompts or settings are another run.
        batch_size, settings: as ``complete`` takes them.

    Attributes:
        total: number of texts of all prompts.
        lines: the rows of ``out``.

    Raises:
        ConfigError, GenerationError: as ``read_prompts``, ``complete`` and ``Lines``.
    """

    def __init__(
        self, model: GPT2, tokenizer: TextCodec, prompts: Path, out: Path, opened_by: str,
        settings: GenerationSettings, *, batch_size: int = 16,
    ) -> None:  # fmt: skip
        self._prompts = read_prompts(prompts)
        texts = [line.prompt for line in self._prompts]
        names = [f"{prompts}, line {line.line}" for line in self._prompts]
        copies = range(settings.num_return_sequences)
        places = list(itertools.product(range(len(texts)), copies))
        skip: set[tuple[int, int]] = set()
        self._texts = complete_texts(  # checks every prompt now, and writes lazily
            model, tokenizer, texts, settings, batch_size=batch_size, skip=skip, names=names
        )
        self.total = len(places)
        run = hash_json([opened_by, self._prompts, settings.as_dict()])
        self.lines = Lines(out, run, GenerationError)
        written = len(self.lines.rows)
        skip.update(places[:written])
        self._left = iter(places[written:])

    def write(self) -> Iterator[Completion]:
        """Yield each text when it is in the file. A text that is finished early waits for those before it.

        Raises:
            GenerationError: as ``complete``, or if the disk is full. The earlier texts stay.
        """
        finished: dict[tuple[int, int], Completion] = {}
        place = next(self._left, None)
        for text in self._texts:
            finished[text.prompt, text.number] = text
            while place in finished:
                first = finished.pop(place)
                line = self._prompts[first.prompt]
                self.lines.append(_row(line, first))
                yield first
                place = next(self._left, None)

    def __enter__(self) -> "TextFile":
        return self

    def __exit__(self, *error: Any) -> None:
        self.lines.__exit__(*error)


def _row(line: PromptLine, text: Completion) -> dict[str, Any]:
    row = {
        "line": line.line, "number": text.number, "id": line.id, "prompt": line.prompt, "text": text.text,
        "end": text.end, "tokens": len(text.ids), "logprobs": text.logprobs,
    }  # fmt: skip
    return {name: value for name, value in row.items() if value is not None}
