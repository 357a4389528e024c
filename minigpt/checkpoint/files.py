"""The files of a checkpoint's folder: their names, and what they hold. Reading one never runs what is in it."""

import os.path
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from minigpt.errors import CheckpointError
from minigpt.json_file import read_object

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
SAFETENSORS, INDEX, SHARDS = "model.safetensors", "model.safetensors.index.json", "model-?????-of-?????.safetensors"
TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
CHAT_TEMPLATE = "chat_template.jinja"
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", TOKENIZER_CONFIG, SPECIAL_TOKENS, CHAT_TEMPLATE)
VOCABULARIES = ("tokenizer.json", "vocab.json")
WEIGHTS = (SAFETENSORS, "pytorch_model.bin", "ckpt.pt")  # the first that exists, whole or with an index

NO_SETTING = (  # fields of a generation_config.json that do not say how to write; the last four of an assistant model
    "_from_model_config", "transformers_version", "bos_token_id", "decoder_start_token_id", "disable_compile",
    "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
)  # fmt: skip
OFF: dict[str, Any] = {  # the values with which the format switches a setting off
    "top_k": 0, "typical_p": 1, "num_beams": 1, "num_beam_groups": 1, "length_penalty": 1, "diversity_penalty": 0,
    "min_length": 0,
    "encoder_repetition_penalty": 1, "encoder_no_repeat_ngram_size": 0, "epsilon_cutoff": 0, "eta_cutoff": 0,
    "guidance_scale": 1, "early_stopping": False, "output_attentions": False, "output_hidden_states": False,
    "output_logits": False, "remove_invalid_values": False, "renormalize_logits": False,
    "return_dict_in_generate": False, "cache_implementation": "dynamic",
}  # fmt: skip


class Contents(NamedTuple):
    """What a file holds: tensors on the CPU, by their names in the file, and the config if it carries one."""

    tensors: dict[str, Tensor]
    fields: Mapping[str, Any] | None = None


def read_contents(place: Path) -> Contents:
    """Return the tensors of a checkpoint, and the config that its weights file carries, if it does.

    They are mapped into memory where the format allows, and read when first used.

    Raises:
        CheckpointError: if there are no weights, or a file is damaged or holds more than tensors.
    """
    first, *more = [_read(file) for file in weight_files(place)]
    for shard in more:
        first.tensors.update(shard.tensors)
    return first


def read_tensors(place: Path) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint by its name in the file. Raises as ``read_contents``."""
    return read_contents(place).tensors


def _read(file: Path) -> Contents:
    try:
        return READERS[file.suffix](file)
    except Exception as error:  # each library raises its own kinds
        # torch.load also says how to run the file without restrictions. Keep only what it found.
        reason = str(error).partition("WeightsUnpickler error:")[2].partition("Please use")[0] or str(error)
        raise CheckpointError(f"{file} cannot be read as a {file.suffix} file: {' '.join(reason.split())}") from error


def read_safetensors(file: Path) -> Contents:
    """Return every tensor of a safetensors file, mapped into memory."""
    return Contents(load_file(file))


def read_npz(file: Path) -> Contents:
    """Return every array of a NumPy archive as a tensor."""
    with np.load(file, allow_pickle=False) as archive:
        return Contents({name: torch.from_numpy(archive[name]) for name in archive.files})


def read_pickle(file: Path) -> Contents:
    """Return the tensors of a state dict, or of a trainer's checkpoint that holds one.

    ``torch.load(weights_only=True)`` reads the pickle. It builds tensors and plain containers, and calls nothing else.
    """
    loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    if not isinstance(loaded, Mapping):
        raise ValueError(f"it must hold a state dict, got a {type(loaded).__name__}")
    nested = ("model", "model_state_dict", "state_dict")  # where trainers keep the weights beside their own state
    state = next((loaded[name] for name in nested if isinstance(loaded.get(name), Mapping)), loaded)
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            raise ValueError(f"{name!r} must be a plain tensor, got a {type(value).__name__}")
    return Contents({name: value.detach() for name, value in state.items()}, loaded.get("model_args"))  # as nanoGPT


READERS: dict[str, Callable[[Path], Contents]] = {
    ".safetensors": read_safetensors,
    ".npz": read_npz,
    **dict.fromkeys((".bin", ".pt", ".pth"), read_pickle),
}
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
    for name in WEIGHTS:
        if (place / name).is_file():
            return [place / name]
        if (place / f"{name}.index.json").is_file():
            return _shards(place / f"{name}.index.json")
    no_config = "" if (place / CONFIG).is_file() else f"no {CONFIG} and "
    others = sorted(path.name for path in place.glob("*") if path.suffix in WEIGHT_SUFFIXES)
    hint = f"; to load one of {', '.join(others)}, give the path of that file" if others else ""
    raise CheckpointError(f"{place} has {no_config}no {SAFETENSORS}{hint}")


def _shards(index: Path) -> list[Path]:
    weight_map = read_object(index, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} must have a weight_map from tensors to files")
    names = sorted(set(map(str, weight_map.values())))
    for name in names:
        if Path(name).name != name or not os.path.isfile(index.parent / name):
            raise CheckpointError(f"{index} names {name!r}, which is not a file beside it")
    return [index.parent / name for name in names]


def generation_fields(place: Path) -> dict[str, Any]:
    """Return all fields of the ``generation_config.json`` beside a checkpoint's weights; an empty dict without one.

    Raises:
        CheckpointError: if the file is not a JSON object.
    """
    path = folder_of(place) / GENERATION_CONFIG
    return read_object(path, CheckpointError) if path.is_file() else {}


def read_generation_config(place: Path) -> dict[str, Any]:
    """Return the settings of generation beside a checkpoint's weights by name: how its makers mean it to write.

    Fields that are null, off, or not about generation are left out. ``GenerationSettings`` checks names and values.

    Raises:
        CheckpointError: if the file is not a JSON object.
    """
    return {
        name: value
        for name, value in generation_fields(place).items()
        if name not in NO_SETTING and value is not None and not (name in OFF and value == OFF[name])
    }
