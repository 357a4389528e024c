"""How many ids of a model stand for text. A vocabulary filled up to a multiple, such as 50,304, has more than that."""

import dataclasses
from pathlib import Path

from minigpt.checkpoint.files import folder_of
from minigpt.config import GPT2Config
from minigpt.errors import CheckpointError
from minigpt.json_file import read_object

MOST_BYTES = 16 * 2**20


def with_known_vocabulary(config: GPT2Config, folder: Path) -> GPT2Config:
    """The config, told how many of its ids the tokenizer in the folder knows where these are fewer.

    Where the config says it too, the larger number counts: a tokenizer may have been given tokens since. One that is
    damaged is for whoever reads texts with it to refuse.
    """
    try:
        known = max(tokenizer_size(folder), config.used_vocab_size or 0)
    except CheckpointError:
        return config
    return dataclasses.replace(config, used_vocab_size=known if 0 < known < config.vocab_size else None)


def has_tokenizer(place: Path) -> bool:
    """Whether the files of a tokenizer are in a checkpoint's folder, or beside its bare file."""
    return any((folder_of(place) / name).is_file() for name in ("tokenizer.json", "vocab.json"))


def tokenizer_size(folder: Path) -> int:
    """One more than the highest id in the folder's tokenizer files; 0 where it has none.

    Raises:
        CheckpointError: a file is damaged.
    """
    if (folder / "tokenizer.json").is_file():
        fields = read_object(folder / "tokenizer.json", CheckpointError, MOST_BYTES)
        model, added = fields.get("model"), fields.get("added_tokens")
        ids = [*_ids(model.get("vocab") if isinstance(model, dict) else None), *_added_ids(added)]
    elif (folder / "vocab.json").is_file():
        ids = _ids(read_object(folder / "vocab.json", CheckpointError, MOST_BYTES))
    else:
        return 0
    return max(ids, default=-1) + 1


def _ids(vocabulary: object) -> list[int]:
    return [value for value in vocabulary.values() if isinstance(value, int)] if isinstance(vocabulary, dict) else []


def _added_ids(added: object) -> list[int]:
    tokens = added if isinstance(added, list) else []
    return [token["id"] for token in tokens if isinstance(token, dict) and isinstance(token.get("id"), int)]
