"""Checkpoint -> model and model -> checkpoint. Strict: every parameter is written exactly once, or none is."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from minigpt import norms
from minigpt.checkpoint.locate import config_file, locate
from minigpt.checkpoint.read import listing, read_tensors
from minigpt.checkpoint.translate import PREFIX, translate
from minigpt.config import GPT2Config
from minigpt.errors import CheckpointError, ConfigError
from minigpt.model import GPT2, quantize_int8, swap_norms
from minigpt.model.conv1d import Conv1D, by_rows
from minigpt.placement import DTYPES, dtype_name, resolve_device, resolve_dtype


def from_pretrained(
    source: str | Path = "demo",
    *,
    norm: norms.NormSpec = "fused",
    attention: str = "sdpa",
    arithmetic: str = "fast",
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    quantize: str | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
) -> GPT2:
    """A pretrained GPT-2 in eval mode.

    On the CPU, in the checkpoint's own dtype, its parameters are the file itself, mapped into memory: nothing is
    copied or transposed, and a page is read when first used. The file must not be overwritten in place meanwhile.

    Args:
        source: a directory, a .safetensors file with a config.json beside it, a Hugging Face repository id, or "demo".
        norm, attention, arithmetic: as ``GPT2`` takes them.
        device: None is CUDA where there is one, else the CPU.
        dtype: float32, bfloat16, float16 or float64; None keeps the checkpoint's own.
        quantize: "int8" holds the weights that multiply in eight bits, a scale for each output channel, on the CPU.
        revision: branch, tag or commit of a repository.
        local_files_only: never ask the network.

    Raises:
        CheckpointError: the source cannot be found, fetched or read, or does not hold exactly this model's tensors.
        ConfigError: the config, dtype, device, quantize, attention or arithmetic cannot be honoured.
        NormError: the norm is unknown or does not fit.
    """
    _require_quantizable(quantize, arithmetic)
    device, dtype = resolve_device("cpu" if quantize and device is None else device), resolve_dtype(dtype)
    place = locate(source, revision=revision, local_files_only=local_files_only)
    config = GPT2Config.from_json_file(config_file(place))
    with torch.device("meta"):  # shapes only: the parameters come from the file
        model = GPT2(config, attention=attention, arithmetic=arithmetic)
    tensors = translate(read_tensors(place), config)
    _require_fitting(tensors, dict(model.named_parameters()), place)
    _install(model, tensors, device, dtype or _only_dtype(tensors, place))
    if norm != "fused":
        swap_norms(model, norm)
    return quantize_int8(model.eval()) if quantize else model.eval()


def _require_quantizable(quantize: str | None, arithmetic: str) -> None:
    if quantize not in (None, "int8"):
        raise ConfigError(f"unknown quantize {quantize!r}; known are int8, and None for the weights as they are")
    if quantize and arithmetic == "reference":
        raise ConfigError(
            'quantize="int8" rounds the weights, so arithmetic="reference" cannot be the reference\'s own'
        )


def load_norms(
    model: GPT2, source: str | Path, *, revision: str | None = None, local_files_only: bool = False
) -> list[str]:
    """Copy only a checkpoint's ``ln_1``, ``ln_2`` and ``ln_f`` weights and biases into ``model``; return their names.

    The checkpoint may hold anything else besides. Values are copied into the model's own Parameters, in its dtype.

    Raises:
        CheckpointError: a norm parameter of the model is missing there or has another shape; nothing is copied then.
    """
    place = locate(source, revision=revision, local_files_only=local_files_only)
    wanted = _norm_parameters(model)
    found = translate(read_tensors(place), dataclasses.replace(model.config, tie_word_embeddings=False))  # any head
    _require_fitting({name: found[name] for name in found.keys() & wanted.keys()}, wanted, place)
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(found[name])
    return list(wanted)


def _norm_parameters(model: GPT2) -> dict[str, nn.Parameter]:
    """The weights and biases of the norms, which are all that a checkpoint holds of them."""
    return {
        f"{site}.{name}": parameter
        for site in model.norm_sites()
        for name, parameter in model.get_submodule(site).named_parameters()
        if name in ("weight", "bias")
    }


@runtime_checkable
class SavesItself(Protocol):
    """What ``save_pretrained`` asks of a tokenizer."""

    def save(self, directory: str | Path) -> None: ...


def save_pretrained(model: GPT2, directory: str | Path, tokenizer: SavesItself | None = None) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer's files into ``directory``.

    ``transformers.AutoModelForCausalLM`` loads it with the same logits, as far as the model's norms are LayerNorm: a
    checkpoint has no word for another. A tied head is not written twice. Each file appears whole or not at all.

    Raises:
        CheckpointError: a norm has a parameter that no GPT-2 has, the model has shapes only (device "meta") or weights
            in eight bits, or the directory cannot be written.
    """
    if model.wte.weight.is_meta:
        raise CheckpointError("a model on the meta device has shapes only, and no values to save")
    if model.quantize is not None:
        raise CheckpointError(
            f"a checkpoint has no place for {model.quantize} weights; keep the one they were made from"
        )
    _require_only_a_gpt2s(model)
    folder = Path(directory).expanduser()
    tensors = {_saved_name(name): tensor.detach().contiguous() for name, tensor in model.named_parameters()}
    ids = {name: value for name, value in model.config.to_dict().items() if name.endswith("_token_id")}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / "model.safetensors.unfinished"  # the weights first: where they fail, nothing has changed
        save_file(tensors, unfinished, metadata={"format": "pt"})
        os.replace(unfinished, folder / "model.safetensors")
        _write_json(folder / "config.json", model.config.to_dict() | {"dtype": dtype_name(model.wte.weight.dtype)})
        _write_json(folder / "generation_config.json", ids)
        if tokenizer is not None:
            tokenizer.save(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot save to {directory}: {error}") from error


def _require_only_a_gpt2s(model: GPT2) -> None:
    sites = tuple(f"{site}." for site in model.norm_sites())
    foreign = {name for name in model.state_dict() if name.startswith(sites)} - _norm_parameters(model).keys()
    if foreign:
        raise CheckpointError(
            f"a GPT-2 checkpoint has no place for {listing(foreign)}; swap those norms back, or keep the state_dict"
        )


def _saved_name(name: str) -> str:
    return name if name.startswith("lm_head.") else PREFIX + name


def _write_json(path: Path, fields: Mapping[str, object]) -> None:
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def _require_fitting(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor], place: Path) -> None:
    missing, unexpected = wanted.keys() - given.keys(), given.keys() - wanted.keys()
    shapes = {name: (tuple(given[name].shape), tuple(wanted[name].shape)) for name in given.keys() & wanted.keys()}
    misshapen = [f"{name} is {has}, not {needs}" for name, (has, needs) in shapes.items() if has != needs]
    strange = [f"{name} is {dtype_name(given[name].dtype)}" for name in shapes if not _computes_in(given[name].dtype)]
    complaints = [
        f"{what} {listing(names)}"
        for what, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape:", misshapen),
            (f"of a dtype other than {', '.join(DTYPES)}:", strange),
        )
        if names
    ]
    if complaints:
        raise CheckpointError(f"{place} does not hold this model's tensors: {'; '.join(complaints)}")


def _computes_in(dtype: torch.dtype) -> bool:
    return dtype in DTYPES.values()


def _only_dtype(tensors: Mapping[str, Tensor], place: Path) -> torch.dtype:
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(dtype_name, dtypes)))
        raise CheckpointError(f"{place} holds tensors of {names}; name the dtype to compute in, such as float32")
    return dtypes.pop()


def _install(model: GPT2, tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> None:
    for name, tensor in tensors.items():
        site, _, parameter = name.rpartition(".")
        module, placed = model.get_submodule(site), tensor.to(device, dtype)
        if placed is not tensor and isinstance(module, Conv1D) and parameter == "weight" and model.arithmetic == "fast":
            placed = by_rows(placed)  # a copy anyway, and so the moment to choose its layout
        module.register_parameter(parameter, nn.Parameter(placed))
