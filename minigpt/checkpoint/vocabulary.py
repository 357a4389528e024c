"""How many ids of a model stand for text. A vocabulary padded to a multiple, e.g. 50,304, has more ids than that."""

import dataclasses
from pathlib import Path

from minigpt.checkpoint.files import folder_of
from minigpt.config import GPT2Config
from minigpt.errors import CheckpointError
from minigpt.json_file import read_object


def with_known_vocabulary(config: GPT2Config, folder: Path) -> GPT2Config:
    """Return the config with the number of ids that the folder's tokenizer knows, if they are fewer.

    If the config says it too, the larger number counts, since a tokenizer may have been given tokens later.
    """
    known = max(tokenizer_size(folder), config.used_vocab_size or 0)
    return dataclasses.replace(config, used_vocab_size=known if 0 < known < config.vocab_size else None)


def has_tokenizer(place: Path) -> bool:
    """Return True if a checkpoint's folder contains the files of a tokenizer."""
    return any((folder_of(place) / name).is_file() for name in ("tokenizer.json", "vocab.json"))


def tokenizer_size(folder: Path) -> int:
    """Return one more than the highest id in the folder's tokenizer files; 0 if it has none.

    Raises:
        CheckpointError: if a file is damaged.
    """
    if (folder / "tokenizer.json").is_file():
        fields = read_object(folder / "tokenizer.json", CheckpointError)
        vocab = fields.get("model", {}).get("vocab", {})
        ids = [*vocab.values()] if isinstance(vocab, dict) else [*range(len(vocab))]  # a Unigram model has a list
        ids += [token["id"] for token in fields.get("added_tokens", ())]
        return max(ids, default=-1) + 1
    if (folder / "vocab.json").is_file():
        return max(read_object(folder / "vocab.json", CheckpointError).values()) + 1
    return 0
