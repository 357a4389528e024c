"""Read the ``generation_config.json`` beside a checkpoint's weights: how its makers mean it to write."""

from pathlib import Path
from typing import Any

from minigpt.checkpoint.files import GENERATION_CONFIG, folder_of
from minigpt.errors import CheckpointError
from minigpt.json_file import read_object

NO_SETTING = (
    "_from_model_config", "transformers_version", "bos_token_id", "decoder_start_token_id", "disable_compile",
    # of an assistant model
    "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
)  # fmt: skip
OFF: dict[str, Any] = {  # the values with which the format switches a setting off
    "top_k": 0, "num_beams": 1, "num_beam_groups": 1, "length_penalty": 1, "diversity_penalty": 0, "min_length": 0,
    "encoder_repetition_penalty": 1, "encoder_no_repeat_ngram_size": 0, "epsilon_cutoff": 0, "eta_cutoff": 0,
    "guidance_scale": 1, "early_stopping": False, "output_attentions": False, "output_hidden_states": False,
    "output_logits": False, "remove_invalid_values": False, "renormalize_logits": False,
    "return_dict_in_generate": False, "cache_implementation": "dynamic",
}  # fmt: skip


def read_generation_config(place: Path) -> dict[str, Any]:
    """Return the settings beside a checkpoint's weights by name; an empty dict if there is no such file.

    Fields that are null, off, or not about generation are left out. ``GenerationSettings`` checks names and values.

    Raises:
        CheckpointError: if the file is not a JSON object.
    """
    return {
        name: value
        for name, value in generation_fields(place).items()
        if name not in NO_SETTING and value is not None and not (name in OFF and value == OFF[name])
    }


def generation_fields(place: Path) -> dict[str, Any]:
    """Return all fields of the file; an empty dict if there is none.

    Raises:
        CheckpointError: if the file is not a JSON object.
    """
    path = folder_of(place) / GENERATION_CONFIG
    return read_object(path, CheckpointError) if path.is_file() else {}
