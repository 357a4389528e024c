"""A checkpoint before it is a model: its config, and its tensors under our names, whatever family it is of."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from minigpt.checkpoint.containers import Contents
from minigpt.checkpoint.files import CONFIG, config_file, folder_of
from minigpt.checkpoint.fitting import require_affordable
from minigpt.checkpoint.formats import Format, Tensors, recognise
from minigpt.checkpoint.frozen_norms import is_frozen, unscaled
from minigpt.checkpoint.read import read_contents
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
        form: the family it is of.
        config: the shape of its model.
        tensors: by our names, in our layout; whether they are all, and of the right shape, has not been asked yet.
        norms: by patterns of sites, those that config.json names.
    """

    place: Path
    form: Format
    config: GPT2Config
    tensors: dict[str, Tensor]
    norms: Pairs


def open_checkpoint(place: Path, *, ignore_heads: bool = False) -> Checkpoint:
    """The checkpoint in a folder or file.

    Args:
        ignore_heads: leave out the heads of classifiers and their like; otherwise they are refused.

    Raises:
        CheckpointError: files are missing, damaged or hostile, or their tensors have no reading as a GPT-2's.
        ConfigError: the config cannot be honoured.
    """
    contents = read_contents(place)
    tensors = without_wrappers(contents.tensors)
    form = recognise(tensors)
    norms: Pairs
    config, has_biases, norms = _config(place, contents, form, tensors)
    require_affordable(config, tensors, place)
    config = with_known_vocabulary(config, folder_of(place))
    ours = as_ours(tensors, form, config, has_biases=has_biases, ignore_heads=ignore_heads)
    if is_frozen(config.layer_norm_epsilon):
        ours = unscaled(ours, config.layer_norm_epsilon)
        norms = [("*", "frozen")]
        config = dataclasses.replace(config, layer_norm_epsilon=GPT2Config.layer_norm_epsilon)
    return Checkpoint(place, form, config, ours, norms)


def _config(place: Path, contents: Contents, form: Format, tensors: Tensors) -> tuple[GPT2Config, bool | None, Pairs]:
    """Return the config, whether it says that there are biases, and the norms that it names."""
    path, fields = _fields(place, contents, form)
    fields, norms = without_norms(fields)
    try:
        if form.fields is not None and _is_theirs(fields, form.fields.keys() | {form.bias_field}):
            return form.config(fields, tensors), _has_biases(fields, form.bias_field), norms
        return GPT2Config.from_dict(fields), None, norms
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _plain(fields: Mapping[Any, Any]) -> Mapping[str, Any]:
    """The fields, which have come with the tensors and may be of any kind.

    Raises:
        ConfigError: one is nothing that a config.json could hold.
    """
    for name, value in fields.items():
        members = value if isinstance(value, list | tuple) else [value]
        if not isinstance(name, str) or not all(isinstance(one, str | int | float | None) for one in members):
            raise ConfigError(
                f"{str(name)[:96]!r} among the config's fields is a {type(value).__name__}, as no config has"
            )
    return fields


def _has_biases(fields: Mapping[str, Any], name: str | None) -> bool | None:
    has_biases = fields.get(name or "")
    if has_biases not in (None, False, True):  # or 0 or 1, as some write it
        raise ConfigError(f"{name} must be true or false, not {has_biases!r:.200}")
    return None if has_biases is None else bool(has_biases)


def _fields(place: Path, contents: Contents, form: Format) -> tuple[Path, Mapping[str, Any]]:
    """The config's fields and where they stand: in config.json, else in the weights' own file, else in hparams.json."""
    beside = folder_of(place)
    if contents.fields is not None and not (beside / CONFIG).is_file():
        return place, _plain(contents.fields)
    if form.fields is not None and (beside / HPARAMS).is_file() and not (beside / CONFIG).is_file():
        return beside / HPARAMS, read_object(beside / HPARAMS, ConfigError)
    path = config_file(place)
    return path, read_object(path, ConfigError)


def _is_theirs(fields: Mapping[str, Any], known: set[str | None]) -> bool:
    ours = {field.name for field in dataclasses.fields(GPT2Config)}
    return bool(fields.keys() & known - ours)
