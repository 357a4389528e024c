"""Text -> rows of tokens to train on."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from minigpt.errors import GenerationError
from minigpt.text_file import read_text
from minigpt.tokenizer import Tokenizer

_DATASET = re.compile(r"[\w.-]+/[\w.-]+(?::[\w.-]+)?")  # owner/name, or owner/name:split


class Blocks(Dataset[dict[str, Tensor]]):
    """Rows of equal length, each with itself as labels."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows  # (N, T)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[place], "labels": self.rows[place]}


def blocks(source: str, tokenizer: Tokenizer, size: int) -> Blocks:
    """Return the texts of ``source``, one after another with an end of text between, cut into rows of ``size`` tokens.

    What is left at the end is dropped, if there is a whole row before it.

    Raises:
        GenerationError: if the source cannot be read, or has fewer than two tokens.
    """
    end = tokenizer.encode("<|endoftext|>")
    ids: list[int] = []
    for text in texts(source):
        ids += [*(end if ids else ()), *tokenizer.encode(text)]
    size = min(size, len(ids))
    if size < 2:
        raise GenerationError(f"{source} has {len(ids)} tokens; training needs 2 or more")
    return Blocks(torch.tensor(ids[: len(ids) // size * size]).view(-1, size))


def require_text(source: str) -> None:
    """Check that a text is there. The name of a dataset is not looked up.

    Raises:
        GenerationError: the message names it.
    """
    if not Path(source).is_file() and not is_dataset(source):
        raise GenerationError(f"{source} is not a file, and not the owner/name of a Hugging Face dataset")


def is_dataset(source: str) -> bool:
    """True if ``source`` must be the name of a dataset."""
    return not Path(source).exists() and not Path(source).suffix and bool(_DATASET.fullmatch(source))


def texts(source: str) -> Iterator[str]:
    """Yield the texts of a file, of a .jsonl file's "text" fields, or of a dataset's "text" column."""
    require_text(source)
    if is_dataset(source):
        yield from _of_dataset(source)
    elif Path(source).suffix in (".jsonl", ".ndjson"):
        for number, line in enumerate(read_text(Path(source), GenerationError).splitlines(), 1):
            if line.strip():
                yield _of_line(line, f"{source}, line {number}")
    else:
        yield read_text(Path(source), GenerationError)


def _of_line(line: str, where: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError):
        text = None
    if not isinstance(text, str):
        raise GenerationError(f'{where} must be a JSON object with a string "text"')
    return text


def _of_dataset(source: str) -> Iterator[str]:
    try:
        import datasets
    except ImportError as error:
        raise GenerationError(f"the dataset {source} needs datasets: pip install 'minigpt[hf]'") from error
    name, _, split = source.partition(":")
    try:
        for row in datasets.load_dataset(name, split=split or "train"):
            yield dict(row)["text"]
    except (OSError, ValueError, KeyError) as error:
        raise GenerationError(f"cannot read the dataset {name}: {str(error).splitlines()[0]}") from error
