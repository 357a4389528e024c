"""The files of a checkpoint's folder: their names, and what they hold. Reading one never runs what is in it."""

import json
import os.path
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from minigpt.errors import CheckpointError
from minigpt.files import PARTIAL, read_object

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
SAFETENSORS = "model.safetensors"
# Patterns of the files that a model is, without its tokenizer.
MODEL = (CONFIG, GENERATION_CONFIG, SAFETENSORS, f"{SAFETENSORS}.index.json", "model-?????-of-?????.safetensors")
TOKENIZER_CONFIG, CHAT_TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
ADDED_TOKENS, SPECIAL_TOKENS = "added_tokens.json", "special_tokens_map.json"  # of transformers 4 and before
VOCABULARIES = ("tokenizer.json", "vocab.json")
TOKENIZER_FILES = (*VOCABULARIES, "merges.txt", TOKENIZER_CONFIG, ADDED_TOKENS, SPECIAL_TOKENS, CHAT_TEMPLATE)
WEIGHT_SUFFIXES = (".safetensors", ".npz", ".bin", ".pt", ".pth")
WEIGHTS = (SAFETENSORS, "pytorch_model.bin", "ckpt.pt")  # the first that exists, whole or with an index
MOST_UNPACKED = 8  # times its own size that an archive may unpack to; trained weights hardly shrink
WEIGHTS_FIELD = "transformers_weights"  # of config.json: the file or index that holds the weights, if it is another
SAVING = "saving"  # names the folder inside that a new checkpoint is written to

Contents = tuple[dict[str, Tensor], Mapping[str, Any] | None]  # tensors on the CPU, and the config that they come with


def read_contents(place: Path) -> Contents:
    """Return the tensors of a checkpoint, and the config that its weights file carries, if it does.

    They are mapped into memory where the format allows, and read when first used.

    Raises:
        CheckpointError: if there are no weights, or a file is damaged or holds more than tensors.
    """
    (tensors, fields), *more = [_read(file) for file in weight_files(place)]
    for shard, _ in more:
        tensors.update(shard)
    return tensors, fields


def read_tensors(place: Path) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint by its name in the file. Raises as ``read_contents``."""
    return read_contents(place)[0]


def _read(file: Path) -> Contents:
    try:
        if file.suffix == ".safetensors":
            return load_file(file), None  # mapped into memory
        is_stored = zipfile.is_zipfile(file) and _is_stored(file)
        if file.suffix == ".npz":
            with np.load(file, allow_pickle=False) as archive:
                return {name: torch.from_numpy(archive[name]) for name in archive.files}, None
        return _read_pickle(file, is_stored)
    except Exception as error:  # each library raises its own kinds
        # torch.load also says how to run the file without restrictions. Keep only what it found.
        reason = str(error).partition("WeightsUnpickler error:")[2].partition("Please use")[0] or str(error)
        raise CheckpointError(f"{file} cannot be read as a {file.suffix} file: {' '.join(reason.split())}") from error


def _is_stored(file: Path) -> bool:
    """Return True if nothing in an archive is compressed.

    Raises:
        ValueError: if it would unpack to far more than its size.
    """
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    size, unpacked = file.stat().st_size, sum(entry.file_size for entry in entries)
    if unpacked > MOST_UNPACKED * size + 2**20:
        raise ValueError(f"it has {size:,} bytes, and would unpack to {unpacked:,}")
    return all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)


def _read_pickle(file: Path, is_stored: bool) -> Contents:
    """Return the tensors of a state dict, or of a trainer's checkpoint that holds one.

    ``torch.load(weights_only=True)`` reads the pickle. It builds tensors and plain containers, and calls nothing else.
    """
    loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=is_stored)
    if not isinstance(loaded, Mapping):
        raise ValueError(f"it must hold a state dict, got a {type(loaded).__name__}")
    nested = ("model", "model_state_dict", "state_dict")  # where trainers keep the weights beside their own state
    state = next((loaded[name] for name in nested if isinstance(loaded.get(name), Mapping)), loaded)
    for name, value in state.items():
        if not isinstance(name, str):
            raise ValueError(f"the name of a tensor must be a string, got {name!r:.100}")
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
            raise ValueError(f"{name!r} must be a plain tensor, got a {type(value).__name__} {_kind(value)}".rstrip())
        if value.nbytes > value.untyped_storage().nbytes():
            raise ValueError(f"{name!r} has shape {tuple(value.shape)}, and the file does not hold so many values")
    return {name: value.detach() for name, value in state.items()}, loaded.get("model_args")  # as nanoGPT


def _kind(value: object) -> str:
    return f"of layout {value.layout} on {value.device}" if isinstance(value, Tensor) else ""


def folder_of(place: Path) -> Path:
    """Return the folder with a checkpoint's files, or the folder that contains its bare file.

    If a save was cut short, the new checkpoint is in a folder inside, which config.json names.
    """
    if not place.is_dir():
        return place.parent
    inner, slash, _ = _named_weights(place).partition("/")
    return place / inner if slash and inner.startswith(f".{SAVING}.") and inner.endswith(PARTIAL) else place


def _named_weights(folder: Path) -> str:
    """Return what config.json says that holds the weights; an empty text if it does not say, or cannot be read."""
    try:
        return str(read_object(folder / CONFIG, CheckpointError).get(WEIGHTS_FIELD) or "")
    except CheckpointError:
        return ""


def config_file(place: Path) -> Path:
    """Return the path of the ``config.json`` in a checkpoint's folder, or beside its bare file.

    Raises:
        CheckpointError: if there is none.
    """
    path = folder_of(place) / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{place} has no {CONFIG}" + " beside it" * place.is_file())
    return path


def has_tokenizer(place: Path) -> bool:
    """Return True if a checkpoint's folder contains the files of a tokenizer."""
    return any((folder_of(place) / name).is_file() for name in VOCABULARIES)


def holds_model(folder: Path) -> bool:
    """Return True if a folder contains a config or weights by a checkpoint's names, or a tokenizer."""
    indexes = (f"{name}.index.json" for name in WEIGHTS)
    return any((folder / name).is_file() for name in (CONFIG, *WEIGHTS, *indexes, *VOCABULARIES))


def weight_files(place: Path) -> list[Path]:
    """Return the files that hold a checkpoint's tensors: one, or those that its index names.

    Raises:
        CheckpointError: if there are none, or the index is damaged or names a file that is not beside it.
    """
    if place.is_file():
        return [place]
    folder = folder_of(place)
    if name := _named_weights(folder):
        _require_beside(folder / CONFIG, name)
        return _shards(folder / name) if name.endswith(".index.json") else [folder / name]
    for name in WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
        if (index := folder / f"{name}.index.json").is_file():
            return _shards(index)
    no_config = "" if (folder / CONFIG).is_file() else f"no {CONFIG} and "
    others = sorted(path.name for path in folder.glob("*") if path.suffix in WEIGHT_SUFFIXES)
    hint = f"; to load one of {', '.join(others)}, give the path of that file" if others else ""
    raise CheckpointError(f"{place} has {no_config}no {SAFETENSORS}{hint}")


def _shards(index: Path) -> list[Path]:
    weight_map = read_object(index, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} must have a weight_map from tensors to files")
    names = sorted(set(map(str, weight_map.values())))
    for name in names:
        _require_beside(index, name)
    return [index.parent / name for name in names]


def _require_beside(file: Path, name: str) -> None:
    if Path(name).name != name or not os.path.isfile(file.parent / name):  # of a path that NUL is in too
        raise CheckpointError(f"{file} names {name!r}, which is not a file beside it")


def write_json(path: Path, fields: Mapping[str, object]) -> None:
    """Write fields as readable JSON.

    Raises:
        OSError: if that fails.
    """
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def generation_fields(place: Path) -> dict[str, Any]:
    """Return all fields of the ``generation_config.json`` beside a checkpoint's weights; an empty dict without one.

    Raises:
        CheckpointError: if the file is not a JSON object.
    """
    return fields_of(folder_of(place) / GENERATION_CONFIG)


def fields_of(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty dict if there is no such file.

    Raises:
        CheckpointError: if the file is not a JSON object.
    """
    return read_object(file, CheckpointError) if file.is_file() else {}
