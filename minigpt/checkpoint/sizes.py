"""A check that a config of another architecture than GPT-2 fits its weights, before memory is taken for it.

The headers of the safetensors files say how large the model is. A config.json that says otherwise was damaged, or is of
another model.
"""

import contextlib
import math
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import nn

from minigpt.checkpoint.contents import CONFIG
from minigpt.choices import AMOUNT, is_number
from minigpt.errors import CheckpointError, ConfigError
from minigpt.files import read_object
from minigpt.norms.foreign.construct import EPS_NAME

LAYER_FIELDS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")
PACKED = 16  # numbers in one number of a quantized file, at most
SPARE_VALUES = 2  # times as many values as the files hold: they leave out a head that is the embedding
SMALL = 2**28  # values that take no memory worth a check


def shapes_in(file: Path) -> dict[str, list[int]]:
    """Return the shapes of the tensors in a safetensors file, by name.

    Raises:
        CheckpointError: if it is damaged.
    """
    shapes: dict[str, list[int]] = {}
    try:
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (it is no dict)
                shapes[name] = weights.get_slice(name).get_shape()
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read as a safetensors file: {error}") from error
    return shapes


def shapes_at(place: Path) -> list[list[int]]:
    """Return the shapes of the tensors in the safetensors files of a folder. A damaged file counts as empty."""
    shapes: list[list[int]] = []
    for file in place.glob("*.safetensors"):
        with contextlib.suppress(CheckpointError):
            shapes += shapes_in(file).values()
    return shapes


def check_counts(place: Path) -> None:
    """Check a folder's config.json against its files of weights, before a module is made for each layer and expert.

    Raises:
        ConfigError: if it says more layers than there are tensors, or more experts than any tensor has rows. Also if
            the eps of a norm is negative or not finite.
    """
    path = place / CONFIG
    fields = read_object(path, ConfigError)
    shapes = shapes_at(place)
    tensors = len(shapes)
    rows = max([tensors, *map(max, filter(None, shapes))])
    text = fields.get("text_config")
    for part in (fields, text if isinstance(text, dict) else {}):
        for names, least, most in ((LAYER_FIELDS, 1, tensors), (EXPERT_FIELDS, 0, rows)):
            for name in names:
                count = part.get(name)
                if most and isinstance(count, int) and not least <= count <= most:
                    raise ConfigError(f"{path}: {name} must be {least} to {most:,} for these files, got {count:,}")
        for name, value in part.items():
            if EPS_NAME.fullmatch(name) and is_number(value) and not AMOUNT.accepts(value):
                raise ConfigError(f"{path}: {name} must {AMOUNT.requirement}, got {value!r}")


def check_memory(place: Path, model: nn.Module, is_quantized: bool) -> None:
    """Check how many values a model needs against how many its files hold.

    Args:
        model: as the config makes it, without values.

    Raises:
        CheckpointError: if it needs many more.
    """
    held = sum(map(math.prod, shapes_at(place)))
    times = SPARE_VALUES
    if is_quantized:
        times = PACKED
    most = max(SMALL, held * times)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    buffers = sum(buffer.numel() for buffer in model.buffers())  # as tables of angles, which no file holds
    for needed, what in ((parameters, "values"), (buffers, "values of tables for its positions")):
        if needed > most:
            raise CheckpointError(f"{place} holds {held:,} values, and its config needs {needed:,} {what}")
