"""A check that a config of another architecture than GPT-2 fits its weights, before memory is taken for it.

The headers of the safetensors files say how large the model is. A config.json that says otherwise was damaged, or is of
another model.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open
from torch import nn

from minigpt.checkpoint.contents import CONFIG
from minigpt.config import AMOUNT, SIZE
from minigpt.errors import CheckpointError, ConfigError
from minigpt.files import read_object

POSITION_FIELDS = ("max_position_embeddings", "n_positions")  # most models have no tensor for them
LAYER_FIELDS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
SIZE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "n_embd",
    "d_model",
    "num_attention_heads",
    "n_head",
    "num_heads",
    "n_heads",
)
PART_FIELDS = (  # which some models lack, or have in another number in each layer
    "num_key_value_heads", "head_dim", "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff",
    "num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size",
)  # fmt: skip
AMOUNT_FIELDS = (
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps", "norm_epsilon",
    "rope_theta", "initializer_range",
)  # fmt: skip
PACKED = 16  # numbers in one number of a quantized file, at most
SPARE_VALUES = 2  # times as many values as the files hold: they leave out a head that is the embedding
SMALL = 2**28  # values that take no memory worth a check


class Headers(NamedTuple):
    """The sizes of the tensors in a folder's safetensors files.

    Attributes:
        tensors: their number.
        values: of all tensors.
        longest: the largest size in any shape.
    """

    tensors: int
    values: int
    longest: int


def read_headers(place: Path) -> Headers:
    """Return the sizes of the tensors in the safetensors files of a folder. A damaged file counts as empty."""
    tensors = values = longest = 0
    for file in sorted(place.glob("*.safetensors")):
        with contextlib.suppress(Exception), safe_open(file, "pt") as weights:  # its library raises its own kinds
            for name in weights.keys():  # noqa: SIM118 (it is no dict)
                shape = weights.get_slice(name).get_shape()
                tensors += 1
                values += math.prod(shape)
                longest = max(longest, *shape, 1)
    return Headers(tensors, values, longest)


def check_fields(place: Path) -> None:
    """Check the values of a folder's config.json, and its sizes against those in the files of weights.

    Raises:
        ConfigError: if a value cannot be one of its field's, or the weights are smaller than it says.
    """
    path = place / CONFIG
    fields = read_object(path, ConfigError)
    if name := next(_not_numbers(fields), None):
        raise ConfigError(f"{path}: {name} is NaN; give its number, or leave it out")
    headers = read_headers(place)
    _check_fields(path, fields, headers)
    if isinstance(text := fields.get("text_config"), dict):
        _check_fields(path, text, headers)


def _check_fields(path: Path, fields: Mapping[str, Any], headers: Headers) -> None:
    for name in (*SIZE_FIELDS, *LAYER_FIELDS, *POSITION_FIELDS, *PART_FIELDS):
        for size in _listed(fields.get(name)):
            is_none = name in PART_FIELDS and type(size) is int and size == 0
            if not (is_none or SIZE.fits(size)):
                raise ConfigError(f"{path}: {name} must be {SIZE.words}, got {size!r:.200}")
            if headers.tensors and name not in POSITION_FIELDS:
                _check_size(path, name, size, headers)
    for name in AMOUNT_FIELDS:
        for amount in _listed(fields.get(name)):
            if not AMOUNT.fits(amount):
                raise ConfigError(f"{path}: {name} must be {AMOUNT.words}, got {amount!r:.200}")


def _check_size(path: Path, name: str, size: int, headers: Headers) -> None:
    most, has = PACKED * headers.longest, f"no tensor longer than {headers.longest:,}"
    if name in LAYER_FIELDS:
        most, has = headers.tensors, f"{headers.tensors:,} tensors"
    if size > most:
        raise ConfigError(f"{path}: {name} is {size:,}, and the files of weights have {has}")


def check_memory(place: Path, model: nn.Module, is_quantized: bool) -> None:
    """Check how many values a model needs against how many its files hold.

    Args:
        model: as the config makes it, without values.

    Raises:
        CheckpointError: if it needs many more.
    """
    held, times = read_headers(place).values, SPARE_VALUES
    if is_quantized:
        times = PACKED
    most = max(SMALL, held * times)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    buffers = sum(buffer.numel() for buffer in model.buffers())  # as tables of angles, which no file holds
    for needed, what in ((parameters, "values"), (buffers, "values of tables for its positions")):
        if needed > most:
            raise CheckpointError(f"{place} holds {held:,} values, and its config needs {needed:,} {what}")


def _listed(value: Any) -> list[Any]:
    """Return the values of a field that may be null, one for all layers, or a list of one for each."""
    if value is None:
        return []
    if isinstance(value, list):
        return value
    return [value]


def _not_numbers(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the fields that are NaN, which JSON does not have and Python reads."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _not_numbers(value)
        for one in _listed(value):
            if isinstance(one, float) and math.isnan(one):
                yield name
