"""Other architectures than GPT-2, which transformers opens. No code of a folder runs."""

import errno
import gc
import os
import re
from collections import Counter
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from minigpt.checkpoint.contents import CONFIG, Files, is_gguf, quantized, require_no_adapter
from minigpt.checkpoint.offloading import can_round_later, device_map_of, may_take, round_like, watched_weights
from minigpt.checkpoint.sizes import check_counts, check_memory
from minigpt.errors import CheckpointError, MiniGPTError, is_about_memory, listing, raised
from minigpt.files import TemporaryFolder
from minigpt.host import Shape, norm_sites
from minigpt.machine import return_memory
from minigpt.offload import is_offloaded
from minigpt.precision import dtype_name
from minigpt.progress import quiet_transformers


def load_with_transformers(
    place: Path,
    *,
    attention: str = "sdpa",
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    is_empty: bool = False,
    memory: str | int | None = None,
    itemsize: int | None = None,
) -> nn.Module:
    """Return the causal language model of a folder in eval mode, without gradients, as transformers' own class.

    Args:
        attention: an architecture that has no "sdpa" gets "eager".
        dtype: None is that of config.json, else of the first weight.
        is_empty: whether to return the modules alone, without values.
        memory: the bytes that it may take, or a size as "8GB"; by default half of those that are free on the device.
            The weights of a larger model stay in their files, and are brought as they are needed.
        itemsize: the bytes that a weight will take, by default those of its dtype.

    Raises:
        CheckpointError: if transformers cannot open it from config.json and safetensors files, or its weights are
            quantized or not alone: an adapter of PEFT is in their folder.
        ConfigError: if config.json cannot be that of these files.
    """
    from transformers import AutoConfig, AutoModelForCausalLM  # imported here, since it takes five seconds

    place_of_weights = torch.device("cpu") if device is None else device

    def load(attention: str) -> Any:
        """Return the model, and what transformers says of its loading."""
        options: dict[str, Any] = dict(
            trust_remote_code=False,
            dtype=dtype or config.dtype or _dtype_of_weights(place),
            attn_implementation=attention,
        )
        is_quantized = getattr(config, "quantization_config", None) is not None
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, **options)
        check_memory(place, model, is_quantized)
        if is_empty:
            return model, {}
        options |= dict(config=config, local_files_only=True, use_safetensors=True, output_loading_info=True)
        weights = sum(parameter.numel() for parameter in model.parameters())
        if weights * (itemsize or model.dtype.itemsize) <= may_take(memory, place_of_weights):
            return AutoModelForCausalLM.from_pretrained(place, **options)
        if is_quantized:
            raise quantized(place, quantization_method(config))  # its weights are unpacked in memory, if at all
        gc.collect()  # a model that accelerate has hooked, and its folder, wait for it
        return_memory()
        folder = TemporaryFolder("weights")  # for those that no file has as the model needs them, as of experts
        room = 0 if place_of_weights.type == "cpu" else may_take(None, torch.device("cpu"))
        device_map = device_map_of(model, place_of_weights, room)
        options |= dict(device_map=device_map, offload_folder=folder.path)
        is_rounded_later = room == 0 and can_round_later(model, options["dtype"], _dtype_of_weights(place))
        if is_rounded_later:  # what the CPU holds beside a GPU is not read again, so it is rounded at once
            options["dtype"] = torch.float32
        loaded: Any = AutoModelForCausalLM.from_pretrained(place, **options)
        if is_rounded_later:
            round_like(loaded[0], model)
        loaded[0].offload_folder = folder  # which is removed with the model
        watched_weights(loaded[0], place)
        return loaded

    if is_gguf(place):
        place = Files.at(place).folder
    if place.is_file():
        raise CheckpointError(f"{place} is a file; an architecture other than GPT-2 is opened from its folder")
    require_no_adapter(place)
    if not any(place.glob("*.safetensors")):
        raise CheckpointError(
            f"{place} has no safetensors file; load it with transformers and save it by save_pretrained"
        )
    check_counts(place)
    try:
        with quiet_transformers():
            config: Any = AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=False)
            config.return_dict, config.output_hidden_states, config.output_attentions = True, False, False
            try:
                model, report = load(attention)
            except MiniGPTError:
                raise
            except ValueError:  # "... does not support an attention implementation through sdpa"
                if attention == "eager":
                    raise
                model, report = load("eager")
    except (MiniGPTError, MemoryError):
        raise
    except raised() as error:  # transformers and what it calls raise many kinds
        if is_about_memory(error):
            raise
        reason = " ".join(str(error).split())
        if os.strerror(errno.ENOSPC) in reason:
            raise CheckpointError(
                f"cannot keep weights of {place} in {gettempdir()}: {reason:.300}; TMPDIR names a folder with more room"
            ) from error
        if "ignore_mismatched_sizes" in reason:  # it has logged the rest
            reason = f"its tensors have other shapes than {CONFIG} says"
        raise CheckpointError(f"transformers cannot open {place} from its safetensors files: {reason:.300}") from error
    if lacking := sorted({*report.get("missing_keys", ()), *map(str, report.get("mismatched_keys", ()))}):
        raise CheckpointError(f"{place} has no {listing(lacking)} of this model's shape")
    model.left_out = sorted(report.get("unexpected_keys", ()))
    require_floating(model, place)
    model.requires_grad_(False)
    model.eval()
    if not is_empty and not is_on_disk(model):
        model.to(device)
    return model


def note_on_left_out(model: Any) -> list[str]:
    """Return a sentence if transformers left out tensors of the files, as biases that config.json denies."""
    names = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in getattr(model, "left_out", ()))
    if not names:
        return []
    return [f"transformers leaves out tensors that the files of this {type(model).__name__} have: {listing(names)}."]


def is_on_disk(model: nn.Module) -> bool:
    """Return whether weights of a model stay in their files."""
    return any(map(is_offloaded, model.modules()))


def require_floating(model: Any, place: Path) -> None:
    """Check that a model computes with weights in a floating dtype, as its float64 truth needs them.

    Raises:
        CheckpointError: if its weights are quantized, and transformers has not dequantized them.
    """
    method = quantization_method(model.config)
    if getattr(model, "is_quantized", False):
        raise quantized(place, method)
    for parameter in model.parameters():
        if parameter.dtype.itemsize == 1 and parameter.dtype != torch.bool:  # float8, or packed integers
            raise quantized(place, method or dtype_name(parameter.dtype))


def quantization_method(config: Any) -> object:
    """Return the ``quant_method`` of a config; None if it has none."""
    settings = getattr(config, "quantization_config", None)
    if isinstance(settings, dict):
        return settings.get("quant_method")
    return getattr(settings, "quant_method", None)


def _dtype_of_weights(place: Path) -> torch.dtype:
    """Return the dtype of the first weight in the safetensors files of a folder."""
    with safe_open(min(place.glob("*.safetensors")), "pt") as weights:
        return weights.get_tensor(min(weights.keys())).dtype


def describe_other(place: Path) -> dict[str, Any]:
    """Return the architecture, shape, parameters and dtype of a model, and its norms by kind. No weight is read.

    Raises:
        CheckpointError: as ``load_with_transformers``.
    """
    model: Any = load_with_transformers(place, is_empty=True)
    shape = Shape.of(model.config)
    norms = Counter(
        (re.sub(r"\.\d+\.", ".*.", path), site.kind, site.eps, site.adds_one)
        for path, site in norm_sites(model).items()
    )
    return {
        "files": str(place),
        "architecture": f"{model.config.model_type}, {type(model).__name__} of transformers",
        "layers": shape.n_layer,
        "width": shape.n_embd,
        "context": shape.n_positions,
        "vocabulary": shape.vocab_size,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": dtype_name(model.dtype),
        "norms": [
            f"{path}: {count} {kind}" + ("" if eps is None else f", eps {eps:g}") + ", 1 + weight" * adds_one
            for (path, kind, eps, adds_one), count in norms.items()
        ],
        "read by": "minigpt parity, study, perplexity and sites; the other commands need a GPT-2",
    }
