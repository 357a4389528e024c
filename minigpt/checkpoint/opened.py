"""A checkpoint before it is a model: its config, and its tensors under our names, for every family."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from minigpt.checkpoint.containers import Contents
from minigpt.checkpoint.files import CONFIG, config_file, folder_of, read_contents
from minigpt.checkpoint.formats import Format, Tensors, recognise
from minigpt.checkpoint.frozen_norms import is_frozen, unscaled
from minigpt.checkpoint.translate import as_ours, without_wrappers
from minigpt.checkpoint.vocabulary import with_known_vocabulary
from minigpt.config import GPT2Config
from minigpt.errors import ConfigError
from minigpt.json_file import read_object
from minigpt.swap.saved import Pairs, without_norms

HPARAMS = "hparams.json"  # OpenAI's


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint's files say.

    Attributes:
        place: its folder or file.
        form: its family.
        config: the shape of its model.
        tensors: by our names, in our layout. Whether they are exactly the model's is not checked yet.
        norms: those that config.json names, by patterns of sites.
    """

    place: Path
    form: Format
    config: GPT2Config
    tensors: dict[str, Tensor]
    norms: Pairs


def open_checkpoint(place: Path) -> Checkpoint:
    """Read the checkpoint in a folder or file.

    Raises:
        CheckpointError: if files are missing or damaged.
        ConfigError: if the config cannot be honoured.
    """
    contents = read_contents(place)
    tensors = without_wrappers(contents.tensors)
    form = recognise(tensors)
    norms: Pairs
    config, norms = _config(place, contents, form, tensors)
    config = with_known_vocabulary(config, folder_of(place))
    ours = as_ours(tensors, form, config)
    if is_frozen(config.layer_norm_epsilon):
        ours = unscaled(ours, config.layer_norm_epsilon)
        norms = [("*", "frozen")]
        config = dataclasses.replace(config, layer_norm_epsilon=GPT2Config.layer_norm_epsilon)
    return Checkpoint(place, form, config, ours, norms)


def _config(place: Path, contents: Contents, form: Format, tensors: Tensors) -> tuple[GPT2Config, Pairs]:
    """Return the config, and the norms that it names."""
    path, fields = _fields(place, contents, form)
    fields, norms = without_norms(fields)
    try:
        if form.fields is not None and _is_theirs(fields, {*form.fields, *form.ignored}):
            return form.config(fields, tensors), norms
        return GPT2Config.from_dict(fields), norms
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _fields(place: Path, contents: Contents, form: Format) -> tuple[Path, Mapping[str, Any]]:
    """Return the config's fields and their file: config.json, else the weights' own file, else hparams.json."""
    folder = folder_of(place)
    if not (folder / CONFIG).is_file():
        if contents.fields is not None:
            return place, contents.fields
        if form.fields is not None and (folder / HPARAMS).is_file():
            return folder / HPARAMS, read_object(folder / HPARAMS, ConfigError)
    path = config_file(place)
    return path, read_object(path, ConfigError)


def _is_theirs(fields: Mapping[str, Any], known: set[str]) -> bool:
    """Return True if a config has fields of the family that are not also ours."""
    ours = {field.name for field in dataclasses.fields(GPT2Config)}
    return bool(fields.keys() & known - ours)
