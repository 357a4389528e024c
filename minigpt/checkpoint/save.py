"""Model -> checkpoint, as transformers reads it."""

import itertools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor

from minigpt.checkpoint.contents import CONFIG, GENERATION_CONFIG, MODEL, TOKENIZER_FILES
from minigpt.checkpoint.norms import as_pairs, norm_at, norm_fields, sites_with_other_eps
from minigpt.checkpoint.read import misfits
from minigpt.checkpoint.replace import replacing
from minigpt.engine.parts import quantize_of
from minigpt.errors import CheckpointError, listing
from minigpt.files import as_path, write_json
from minigpt.inputs import check_gpt2, check_weights
from minigpt.model import GPT2
from minigpt.offload import uncompiled
from minigpt.precision import dtype_name

MAX_SHARD_BYTES = 5 * 10**9
PREFIX = "transformer."  # of a GPT2LMHeadModel's file; a GPT2Model's has none


class SavesItself(Protocol):
    """The methods of a tokenizer that ``save_pretrained`` calls."""

    def save(self, directory: str | Path) -> None: ...


def save_pretrained(
    model: GPT2,
    directory: str | Path,
    tokenizer: SavesItself | None = None,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    generation_config: Mapping[str, Any] | None = None,
) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer's files into ``directory``.

    ``transformers.AutoModelForCausalLM`` loads it with the same logits if all norms are LayerNorm. A model with other
    norms is saved as a "minigpt-gpt2", which transformers does not take for a GPT-2. Its config.json names the norms:
    ``from_pretrained`` builds the registered ones again, and others if the caller names them. A warning says if an eps
    is not the config's, since a checkpoint has no field for it. A tied head is not written twice. The files of an
    earlier checkpoint in the folder are replaced at one moment, when all new ones are on disk.

    Args:
        model: its parameters are on any device but meta.
        directory: created if it does not exist.
        tokenizer: is saved with the model.
        max_shard_bytes: larger weights are divided into files of at most so many bytes, with an index; a larger tensor
            has a separate file.
        generation_config: settings for generation_config.json, beside the model's own ``generation_fields``. A model
            without them has the config's ids of tokens.

    Raises:
        ConfigError: if the model is not a GPT2.
        CheckpointError: if the model has other layers, shapes only (device "meta") or weights in eight bits, or the
            directory cannot be written.
    """
    check_gpt2(model)
    check_weights(model, "save", CheckpointError)
    place = as_path(directory, "directory", CheckpointError)
    quantize = quantize_of(model)
    if quantize is not None:
        raise CheckpointError(f"{quantize} weights cannot be saved; keep the checkpoint that they come from")
    tensors, norms = _saved_tensors(model), norm_fields(model)
    _require_whole(model, tensors, norms.get("norm", []))
    _warn_of_other_eps(model)
    config = model.config.to_dict()
    settings = model.generation_fields
    if settings is None:
        settings = {name: value for name, value in config.items() if name.endswith("_token_id")}
    settings = {**settings, **(generation_config or {})}
    config |= {"dtype": dtype_name(model.wte.weight.dtype)}
    replaced = MODEL
    if tokenizer is not None:
        replaced += TOKENIZER_FILES
    try:
        with replacing(place, replaced) as folder:
            _write_weights(folder, tensors, max_shard_bytes)
            write_json(folder / CONFIG, config | norms)
            write_json(folder / GENERATION_CONFIG, settings)
            if tokenizer is not None:
                tokenizer.save(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot save to {directory}: {getattr(error, 'strerror', None) or error}") from error


def _warn_of_other_eps(model: GPT2) -> None:
    """Warn of norms whose eps is not the config's, which a checkpoint has no field for."""
    others = sites_with_other_eps(model)
    if not others:
        return
    values = sorted(set(itertools.chain.from_iterable(others.values())))
    logging.getLogger("minigpt").warning(
        "the checkpoint cannot say that eps is %s at %s; it will load with the config's %g",
        ", ".join(f"{eps:g}" for eps in values), listing(others), model.config.layer_norm_epsilon,
    )  # fmt: skip


def _saved_tensors(model: GPT2) -> dict[str, Tensor]:
    """Return the state_dict by a checkpoint's names. Memory that is shared, as by a norm at two sites, is copied."""
    places: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict().items():
        tensor = tensor.detach().contiguous()
        place = tensor.untyped_storage().data_ptr()
        if place in places:
            tensor = tensor.clone()
        tensors[_saved_name(name)] = tensor
        places.add(place)
    return tensors


def _write_weights(folder: Path, tensors: dict[str, Tensor], max_shard_bytes: int) -> None:
    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict(tensors, folder, max_shard_size=max_shard_bytes)
    (folder / CONFIG).touch()
    mode = (folder / CONFIG).stat().st_mode  # that of any new file; safetensors lets only the owner read its own
    for path in folder.iterdir():
        path.chmod(mode)


def _require_whole(model: GPT2, tensors: Mapping[str, Tensor], named: Any) -> None:
    """Check that the tensors are a GPT-2's of this config, except the norms that the config has ``named``.

    Raises:
        CheckpointError: the message names what is missing, unexpected or of another shape.
    """
    with torch.device("meta"):
        expected = {_saved_name(name): tensor for name, tensor in GPT2(model.config).state_dict().items()}
    others = []
    for site in model.site_names():
        if norm_at(as_pairs(named), site):
            others.append(_saved_name(f"{site}."))
    complaints = misfits(_not_of_sites(tensors, others), _not_of_sites(expected, others))
    if complaints:
        raise CheckpointError(f"the model is not a GPT-2 of its config: {'; '.join(complaints)}; keep the state_dict")


def _not_of_sites(tensors: Mapping[str, Tensor], sites: list[str]) -> dict[str, Tensor]:
    """Return the tensors that are not of these sites, by the beginning of their names."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(tuple(sites))}


def _saved_name(name: str) -> str:
    name = uncompiled(name)
    if name.startswith("lm_head."):
        return name
    return PREFIX + name
