"""The files of a checkpoint's folder: what they are called, and which of them hold its tensors and its config."""

import os.path
from pathlib import Path

from minigpt.checkpoint.containers import READERS
from minigpt.errors import CheckpointError
from minigpt.json_file import read_object

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
SAFETENSORS, INDEX, SHARDS = "model.safetensors", "model.safetensors.index.json", "model-?????-of-?????.safetensors"
TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", TOKENIZER_CONFIG, SPECIAL_TOKENS, CHAT_TEMPLATE)
WEIGHTS = (SAFETENSORS, "pytorch_model.bin", "ckpt.pt")  # the first that is there, whole or by its index
WEIGHT_SUFFIXES = tuple(READERS)  # of files that hold tensors


def weight_files(place: Path) -> dict[str, Path] | list[Path]:
    """The files that hold a checkpoint's tensors: one, or by tensor name as the index of a sharded one says.

    Raises:
        CheckpointError: there is none, or the index is broken or points outside its folder.
    """
    if place.is_file():
        return [place]
    for name in WEIGHTS:
        if (place / name).is_file():
            return [place / name]
        if (place / f"{name}.index.json").is_file():
            return _shards(place / f"{name}.index.json", Path(name).suffix)
    no_config = "" if (place / CONFIG).is_file() else f"no {CONFIG} and "
    raise CheckpointError(f"{place} has {no_config}no {WEIGHTS[0]}" + _what_is_there(place))


def config_file(place: Path) -> Path:
    """The ``config.json`` in a checkpoint's folder, or beside its bare file.

    Raises:
        CheckpointError: there is none.
    """
    path = folder_of(place) / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{place} has no {CONFIG}" + " beside it" * place.is_file())
    return path


def folder_of(place: Path) -> Path:
    """The folder that a checkpoint is, or that its bare file lies in."""
    return place if place.is_dir() else place.parent


def _shards(index: Path, suffix: str) -> dict[str, Path]:
    weight_map = read_object(index, CheckpointError).get("weight_map")
    is_map = isinstance(weight_map, dict) and all(isinstance(file, str) for file in weight_map.values())
    if not (is_map and weight_map):
        raise CheckpointError(f"{index} is not the index of a sharded checkpoint: it has no weight_map of file names")
    shards = {tensor: index.parent / file for tensor, file in weight_map.items()}
    for file in set(shards.values()):
        if file.parent != index.parent or file.suffix != suffix:
            raise CheckpointError(f"{index} names {str(file)!r}, which is not a {suffix} file in its own folder")
        if not os.path.isfile(file):  # False where pathlib raises, as for a name that no file can have
            raise CheckpointError(f"{index} names {file.name!r}, which is not there")
        if not _stays_inside(file, index.parent):
            raise CheckpointError(f"{index} names {file.name!r}, which is a link to a file outside its folder")
    return shards


def _stays_inside(file: Path, folder: Path) -> bool:
    """Whether the file itself lies in the folder, or among the blobs that a folder of the hub's cache is a view of."""
    folder, real = folder.resolve(), file.resolve()
    cached = folder.parent.name == "snapshots" and real.is_relative_to(folder.parents[1] / "blobs")
    return cached or real.is_relative_to(folder)


def _what_is_there(folder: Path) -> str:
    files = sorted(path.name for path in folder.glob("*") if path.suffix in WEIGHT_SUFFIXES and path.is_file())
    return f"; give the file itself where it is one of {', '.join(files[:8])}" if files else ""
