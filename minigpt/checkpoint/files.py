"""The files of a checkpoint's folder: their names, and which of them hold its tensors and its config."""

import os.path
from pathlib import Path

from torch import Tensor

from minigpt.checkpoint.containers import READERS, Contents, read_file
from minigpt.errors import CheckpointError
from minigpt.json_file import read_object

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
SAFETENSORS, INDEX, SHARDS = "model.safetensors", "model.safetensors.index.json", "model-?????-of-?????.safetensors"
TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", TOKENIZER_CONFIG, SPECIAL_TOKENS, CHAT_TEMPLATE)
WEIGHTS = (SAFETENSORS, "pytorch_model.bin", "ckpt.pt")  # the first that exists, whole or with an index
WEIGHT_SUFFIXES = tuple(READERS)  # of files that hold tensors


def folder_of(place: Path) -> Path:
    """Return a checkpoint's folder, or the folder that contains its bare file."""
    return place if place.is_dir() else place.parent


def config_file(place: Path) -> Path:
    """Return the path of the ``config.json`` in a checkpoint's folder, or beside its bare file.

    Raises:
        CheckpointError: if there is none.
    """
    path = folder_of(place) / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{place} has no {CONFIG}" + " beside it" * place.is_file())
    return path


def holds_model(folder: Path) -> bool:
    """Return True if a folder contains a config or weights by a checkpoint's names, or a tokenizer."""
    indexes = (f"{name}.index.json" for name in WEIGHTS)
    return any((folder / name).is_file() for name in (CONFIG, *WEIGHTS, *indexes, "tokenizer.json", "vocab.json"))


def weight_files(place: Path) -> list[Path]:
    """Return the files that hold a checkpoint's tensors: one, or those that its index names.

    Raises:
        CheckpointError: if there are none, or the index is damaged or names a file that is not beside it.
    """
    if place.is_file():
        return [place]
    for name in WEIGHTS:
        if (place / name).is_file():
            return [place / name]
        if (place / f"{name}.index.json").is_file():
            return _shards(place / f"{name}.index.json")
    no_config = "" if (place / CONFIG).is_file() else f"no {CONFIG} and "
    others = sorted(path.name for path in place.glob("*") if path.suffix in WEIGHT_SUFFIXES)
    hint = f"; to load one of {', '.join(others)}, give the path of that file" if others else ""
    raise CheckpointError(f"{place} has {no_config}no {SAFETENSORS}{hint}")


def read_tensors(place: Path) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint by its name in the file.

    Raises:
        CheckpointError: if there are no weights, or a file is damaged.
    """
    return read_contents(place).tensors


def read_contents(place: Path) -> Contents:
    """Return the tensors of a checkpoint, and the config that its weights file carries, if it does.

    Raises:
        CheckpointError: if there are no weights, or a file is damaged.
    """
    first, *more = [read_file(file) for file in weight_files(place)]
    for shard in more:
        first.tensors.update(shard.tensors)
    return first


def _shards(index: Path) -> list[Path]:
    weight_map = read_object(index, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} must have a weight_map from tensors to files")
    names = sorted(set(map(str, weight_map.values())))
    for name in names:
        if Path(name).name != name or not os.path.isfile(index.parent / name):
            raise CheckpointError(f"{index} names {name!r}, which is not a file beside it")
    return [index.parent / name for name in names]
