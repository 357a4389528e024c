"""Text -> rows of tokens to train on."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from minigpt.errors import GenerationError
from minigpt.files import read_text
from minigpt.tokenizer import Tokenizer

_DATASET = re.compile(r"[\w.-]+/[\w-]+(:[\w.-]+)?")  # owner/name, or owner/name:split


def blocks(source: str, tokenizer: Tokenizer, size: int) -> list[dict[str, Tensor]]:
    """Return the texts of ``source``, one after another with an end of text between, cut into rows of ``size`` tokens.

    Each row is its own labels. What is left at the end is dropped, if there is a whole row before it.

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
    rows = torch.tensor(ids[: len(ids) // size * size]).view(-1, size)
    return [{"input_ids": row, "labels": row} for row in rows]


def require_text(source: str) -> None:
    """Check that a text is there. The name of a dataset is not looked up.

    Raises:
        GenerationError: the message names it.
    """
    if not Path(source).is_file() and not _DATASET.fullmatch(source):
        raise GenerationError(f"{source} is not a file, and not the owner/name of a Hugging Face dataset")


def texts(source: str) -> Iterator[str]:
    """Yield the texts of a file, of a .jsonl file's "text" fields, or of a dataset's "text" column."""
    if not Path(source).is_file():
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
    name, _, split = source.partition(":")
    try:
        from datasets import load_dataset

        yield from load_dataset(name, split=split or "train")["text"]
    except ImportError as error:
        raise GenerationError(f"the dataset {source} needs datasets: pip install 'minigpt[hf]'") from error
    except (OSError, ValueError, KeyError) as error:
        raise GenerationError(f"cannot read the dataset {name}: {str(error).splitlines()[0]}") from error
