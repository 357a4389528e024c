"""The ``generation_config.json`` beside a checkpoint's weights: how its makers mean it to write."""

import json
from pathlib import Path
from typing import Any

from minigpt.checkpoint.locate import locate
from minigpt.errors import CheckpointError

FILE = "generation_config.json"
NO_SETTING = ("_from_model_config", "transformers_version", "bos_token_id", "decoder_start_token_id")
OFF = {"top_k": 0}  # what the format writes for "not at all"


def read_generation_config(
    source: str | Path = "demo", *, revision: str | None = None, local_files_only: bool = False
) -> dict[str, Any]:
    """The settings beside a checkpoint's weights, by name; none where there is no such file.

    What says nothing about what to write is left out, and so is what is null or off. Whether the names and values are
    settings is for ``GenerationSettings`` to judge.

    Raises:
        CheckpointError: the source cannot be found, or the file is no JSON object.
    """
    place = locate(source, revision=revision, local_files_only=local_files_only)
    path = (place if place.is_dir() else place.parent) / FILE
    if not path.is_file():
        return {}
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return {
        name: value
        for name, value in fields.items()
        if name not in NO_SETTING and value is not None and not (name in OFF and value == OFF[name])
    }
