"""Model -> checkpoint, as transformers reads it."""

import json
import logging
import os.path
from collections.abc import Iterator, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from minigpt.checkpoint.atomic import REPLACED, replacing, resolved
from minigpt.checkpoint.files import CONFIG, GENERATION_CONFIG, INDEX, SAFETENSORS, TOKENIZER_FILES
from minigpt.checkpoint.fitting import misfits
from minigpt.checkpoint.translate import PREFIX
from minigpt.engine import GPT2
from minigpt.errors import CheckpointError, listing
from minigpt.model.attention import score_scale
from minigpt.model.checks import check_gpt2, check_weights
from minigpt.model.mlp import activation
from minigpt.placement import dtype_name
from minigpt.swap.saved import as_pairs, eps_unsaid, norm_at, norm_fields

MAX_SHARD_BYTES = 5 * 10**9


@runtime_checkable
class SavesItself(Protocol):
    """What ``save_pretrained`` asks of a tokenizer."""

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
    ``from_pretrained`` builds the registered ones again, and others if the caller names them. A warning says if an eps,
    an activation or a scale of attention is not the config's, since a checkpoint has no field for it. A tied head is
    not written twice. What the folder held of an earlier checkpoint is replaced at one moment, when all of the new one
    is on disk: see ``checkpoint/atomic.py``.

    Args:
        model: its parameters are on any device but meta.
        directory: is made where it is not there.
        tokenizer: is saved beside the model.
        max_shard_bytes: weights larger than this are divided into files of at most so many bytes, and an index; a
            tensor that is larger has a file to itself.
        generation_config: settings for generation_config.json, beside the config's own ids of tokens.

    Raises:
        ConfigError: if the model is not a GPT2.
        CheckpointError: if the model has other layers, shapes only (device "meta") or weights in eight bits, the
            tokenizer cannot save itself, or the directory cannot be written.
    """
    _require_savable(model, directory, tokenizer, max_shard_bytes)
    settings = _generation_settings(model, generation_config)
    tensors = _saved_tensors(model)
    of_norms = norm_fields(model)
    _require_whole(model, tensors, of_norms.get("norm", []))
    for unsaid in (_other_eps(model), _other_functions(model)):
        if unsaid is not None:
            logging.getLogger("minigpt").warning("what is saved does not say %s", unsaid)
    fields = model.config.to_dict() | {"dtype": dtype_name(model.wte.weight.dtype)} | of_norms
    try:
        with replacing(Path(directory), REPLACED + (() if tokenizer is None else TOKENIZER_FILES)) as folder:
            _write_weights(folder, tensors, max_shard_bytes)
            _write_json(folder / CONFIG, fields)
            _write_json(folder / GENERATION_CONFIG, settings)
            if tokenizer is not None:
                tokenizer.save(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot save to {directory}: {getattr(error, 'strerror', None) or error}") from error


def require_unquantized(model: GPT2) -> None:
    """Refuse to save weights in eight bits.

    Raises:
        CheckpointError: a checkpoint has no place for them.
    """
    if model.quantize is not None:
        raise CheckpointError(
            f"a checkpoint has no place for {model.quantize} weights; keep the one they were made from"
        )


def _require_savable(model: GPT2, directory: str | Path, tokenizer: object, max_shard_bytes: int) -> None:
    check_gpt2(model)
    check_weights(model, "save", CheckpointError)
    require_unquantized(model)
    if not isinstance(directory, str | os.PathLike):
        raise CheckpointError(f"a directory is named by a text or a Path, not a {type(directory).__name__}")
    if not os.fspath(directory):
        raise CheckpointError("there is no name of a directory to save to; '.' is the one that you are in")
    place = resolved(directory)
    if (file := next(filter(os.path.isfile, (place, *place.parents)), None)) is not None:
        raise CheckpointError(f"cannot save to {directory}: {file} is a file; give the name of a directory")
    if not isinstance(max_shard_bytes, Integral) or max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes must be a whole number, 1 or more, not {max_shard_bytes!r}")
    if not (tokenizer is None or isinstance(tokenizer, SavesItself)):
        raise CheckpointError(f"the tokenizer is a {type(tokenizer).__name__}; take minigpt.Tokenizer.from_pretrained")


def _generation_settings(model: GPT2, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields of generation_config.json: the config's own ids of tokens, and what is given."""
    if not isinstance(given, Mapping | None):
        raise CheckpointError(f"generation_config must be a dict, not a {type(given).__name__}")
    if unnamed := [name for name in given or () if not isinstance(name, str)]:
        raise CheckpointError(f"the names of a generation_config are texts, not {unnamed[0]!r:.100}")
    ids = {name: value for name, value in model.config.to_dict().items() if name.endswith("_token_id")}
    settings = {**ids, **(given or {})}
    try:
        json.dumps(settings, allow_nan=False)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"the generation_config cannot be saved as JSON: {error}") from error
    return settings


def _saved_tensors(model: GPT2) -> dict[str, Tensor]:
    """The state_dict by a checkpoint's names; of memory that has several, as that of a norm at two sites, copies."""
    places: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict().items():
        tensor = tensor.detach().contiguous()
        place = tensor.untyped_storage().data_ptr()
        tensors[_saved_name(name)] = tensor.clone() if place in places else tensor
        places.add(place)
    return tensors


def _write_weights(folder: Path, tensors: Mapping[str, Tensor], most: int) -> None:
    shards = list(_shards(tensors, most))
    if len(shards) == 1:
        _write_file(folder / SAFETENSORS, shards[0])
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_file(folder / name, shard)
        weight_map |= dict.fromkeys(shard, name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    path.touch()
    mode = path.stat().st_mode  # which any new file has here; the library lets nobody but the owner read its own
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)


def _shards(tensors: Mapping[str, Tensor], most: int) -> Iterator[dict[str, Tensor]]:
    """The tensors in their order, as many together as fit."""
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if shard and sum(kept.nbytes for kept in shard.values()) + tensor.nbytes > most:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard


def _require_whole(model: GPT2, tensors: Mapping[str, Tensor], named: Any) -> None:
    """Check that the tensors are a GPT-2's of this config, except those of norms that the config has ``named``.

    Raises:
        CheckpointError: the message names what is missing, unexpected or of another shape.
    """
    with torch.device("meta"):
        wanted = {_saved_name(name): tensor for name, tensor in GPT2(model.config).state_dict().items()}
    others = tuple(_saved_name(f"{site}.") for site in model.norm_sites() if norm_at(as_pairs(named), site))
    both = ({name: tensor for name, tensor in one.items() if not name.startswith(others)} for one in (tensors, wanted))
    if complaints := misfits(*both):
        raise CheckpointError(f"the model is not a GPT-2 of its config: {'; '.join(complaints)}; keep the state_dict")


def _other_eps(model: GPT2) -> str | None:
    others, of_config = eps_unsaid(model), model.config.layer_norm_epsilon
    values = ", ".join(f"{eps:g}" for eps in sorted({eps for found in others.values() for eps in found}))
    said = f"that eps is {values} at {listing(others)}: whoever loads it gets the config's, {of_config:g}"
    return said if others else None


def _other_functions(model: GPT2) -> str | None:
    act = activation(model.config.activation_function)
    blocks: Any = model.h
    others: list[str] = []
    for i, block in enumerate(blocks):
        scale = score_scale(model.config, i)
        if getattr(block.mlp, "act", act) is not act:
            others.append(f"h.{i}.mlp.act")
        if getattr(block.attn, "scale", scale) != scale:
            others.append(f"h.{i}.attn.scale")
    said = f"what was put at {listing(others)}: whoever loads it gets what the config names"
    return said if others else None


def _saved_name(name: str) -> str:
    name = _unwrapped(name)
    return name if name.startswith("lm_head.") else PREFIX + name


def _unwrapped(name: str) -> str:
    return name.replace("_orig_mod.", "")  # of what torch.compile has wrapped


def _write_json(path: Path, fields: Mapping[str, object]) -> None:
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
