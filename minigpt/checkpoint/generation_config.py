"""The ``generation_config.json`` beside a checkpoint's weights: how its makers mean it to write."""

from pathlib import Path
from typing import Any

from minigpt.checkpoint.files import GENERATION_CONFIG, folder_of
from minigpt.errors import CheckpointError
from minigpt.json_file import read_object

NO_SETTING = (
    "_from_model_config", "transformers_version", "bos_token_id", "decoder_start_token_id", "disable_compile",
    # of an assistant model, which is another
    "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
)  # fmt: skip
OFF: dict[str, Any] = {  # what the format writes for "not at all"
    "top_k": 0, "num_beams": 1, "num_beam_groups": 1, "length_penalty": 1, "diversity_penalty": 0, "min_length": 0,
    "encoder_repetition_penalty": 1, "encoder_no_repeat_ngram_size": 0, "epsilon_cutoff": 0, "eta_cutoff": 0,
    "guidance_scale": 1, "early_stopping": False, "output_attentions": False, "output_hidden_states": False,
    "output_logits": False, "remove_invalid_values": False, "renormalize_logits": False,
    "return_dict_in_generate": False, "cache_implementation": "dynamic",
}  # fmt: skip


def read_generation_config(place: Path) -> dict[str, Any]:
    """The settings beside a checkpoint's weights, by name; none where there is no such file. ``place`` is as located.

    What says nothing about what to write is left out, and so is what is null or off. Whether the names and values are
    settings is for ``GenerationSettings`` to judge.

    Raises:
        CheckpointError: the file is too large, no JSON object, or names one thing twice.
    """
    return {
        name: value
        for name, value in generation_fields(place).items()
        if name not in NO_SETTING and value is not None and not _is_off(name, value)
    }


def generation_fields(place: Path) -> dict[str, Any]:
    """All that the file says, as it says it; nothing where there is none.

    Raises:
        CheckpointError: the file is too large, no JSON object, or names one thing twice.
    """
    path = folder_of(place) / GENERATION_CONFIG
    return read_object(path, CheckpointError) if path.is_file() else {}


def _is_off(name: str, value: Any) -> bool:
    return name in OFF and value == OFF[name] and isinstance(value, bool) == isinstance(OFF[name], bool)
