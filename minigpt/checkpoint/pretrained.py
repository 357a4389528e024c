"""Checkpoint -> model, and what the model is. Strict: every parameter is written exactly once, or none is."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import minigpt.norms as norms
from minigpt.checkpoint.contents import Files, is_gguf, local_place, read_stable
from minigpt.checkpoint.norms import Pairs, norm_at, require_registered
from minigpt.checkpoint.read import Checkpoint, converted, only_dtype, read_checkpoint, require_fitting
from minigpt.engine import accelerate
from minigpt.engine.int8 import why_not_drafted
from minigpt.engine.supported import path_of, why_not
from minigpt.errors import NormError
from minigpt.inputs import check_gpt2, check_weights
from minigpt.model import GPT2
from minigpt.norms.frozen import FrozenLayerNorm, as_calibration
from minigpt.norms.record import record_of
from minigpt.precision import dtype_name


def load_model(
    checkpoint: Checkpoint,
    code: Pairs,
    *,
    attention: str,
    arithmetic: str,
    device: torch.device,
    dtype: torch.dtype | None,
) -> GPT2:
    """Return the model of a checkpoint in eval mode, with the checkpoint's own norms. Takes the checkpoint's tensors.

    Args:
        code: the classes of the norms that config.json names and that are not registered, by patterns of sites.
        dtype: None keeps the checkpoint's own.

    Raises:
        CheckpointError: if the checkpoint does not hold exactly this model's tensors.
        NormError: if the checkpoint names a norm that is neither registered nor in ``code``.
    """
    with torch.device("meta"):  # shapes only: the parameters come from the file
        model = GPT2(checkpoint.config, attention=attention)
    if arithmetic == "fast":
        accelerate(model)
    trained = put_norms(model, checkpoint, code)
    tensors, needed = checkpoint.tensors, model.state_dict()
    for name, tensor in tensors.items():
        if name in needed and needed[name].shape == (1,) and tensor.ndim == 0:  # a norm that an earlier version saved
            tensors[name] = tensor.view(1)
    for path, part in model.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is None and f"{path}.{name}" in tensors:  # which a checkpoint may hold
                needed[f"{path}.{name}"] = tensors[f"{path}.{name}"]
    require_fitting(tensors, needed, checkpoint.place)
    _install(model, tensors, device, dtype or only_dtype(tensors, checkpoint.place))
    for site in trained:
        model.get_submodule(site).to(device, model.wte.weight.dtype)  # buffers that are not in the checkpoint
    return model.eval()


def put_norms(model: GPT2, checkpoint: Checkpoint, code: Pairs) -> dict[str, norms.NormSpec]:
    """Build the norms that a checkpoint names, where they are not LayerNorm; return them by site.

    A norm that is not registered is built from ``code``, by patterns of sites. It keeps the scale and
    the shift that the checkpoint has.

    Raises:
        NormError: if the caller does not name it, or it cannot be built.
    """
    built: dict[str, norms.NormSpec] = {}
    for site in model.site_names():
        norm = norm_at(checkpoint.norms, site)
        if norm is None or norm == "fused":
            continue
        if not norms.is_registered(norm):
            chosen = norm_at(code, site)
            if chosen is None:  # a file never makes code run
                require_registered(norm)
            norm = chosen or norm
        keep = []
        for role, name in (("scale", "weight"), ("shift", "bias")):
            if f"{site}.{name}" in checkpoint.tensors:
                keep.append(role)
        with torch.device("cpu"):  # a class computes its first values, which are not all in the checkpoint
            module = norms.build(
                norm, model.config.n_embd, eps=model.config.layer_norm_epsilon, bias="shift" in keep, keep=keep
            )
        record_of(module).trained = norms.name_of(norm)
        model.set_submodule(site, module)
        built[site] = norm
    return built


def load_norms(
    model: GPT2, source: str | Path, *, revision: str | None = None, local_files_only: bool = False
) -> list[str]:
    """Copy only a checkpoint's ``ln_1``, ``ln_2`` and ``ln_f`` weights and biases into ``model``; return their names.

    The checkpoint may hold anything else besides. Values are copied into the model's own Parameters, in its dtype.

    Raises:
        CheckpointError: if the source cannot be found or read, or a norm parameter of the model is missing there or has
            another shape. Nothing is copied then.
        ConfigError: if the model is not a GPT2.
        NormError: if a norm's weight is computed from others, as by pruning, or the model has no values.
    """
    from minigpt.swap.sites import require_own_parameters

    check_gpt2(model)
    check_weights(model, "load into", NormError)
    for site, norm in model.norm_modules().items():
        require_own_parameters(site, norm)
    place = local_place(source, revision=revision, local_files_only=local_files_only)
    parameters = norm_parameters(model)
    tensors = read_stable(place, loaded_tensors)
    shared = {name: tensors[name] for name in parameters if name in tensors}
    require_fitting(shared, parameters, place)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    return list(parameters)


def loaded_tensors(files: Files) -> dict[str, Tensor]:
    """Return a checkpoint's tensors by our names; those of another architecture keep theirs.

    Raises:
        CheckpointError: if files are missing or damaged.
    """
    source_tensors, _ = files.tensors()
    _, tensors = converted(source_tensors, files.place)
    return tensors


def norm_parameters(model: GPT2) -> dict[str, nn.Parameter]:
    """Return the weights and biases of the norms by name."""
    parameters: dict[str, nn.Parameter] = {}
    for site, norm in model.norm_modules().items():
        for name in ("weight", "bias"):
            parameter = getattr(norm, name, None)
            if parameter is not None:
                parameters[f"{site}.{name}"] = parameter
    return parameters


def _install(model: GPT2, tensors: dict[str, Tensor], device: torch.device, dtype: torch.dtype) -> None:
    """Move the tensors into the model. The original of each copied tensor is freed at once.

    The largest tensors come first, so that the peak of memory is one of them and its copy.
    """
    largest_first = sorted(tensors, key=lambda name: tensors[name].nbytes, reverse=True)
    for name in largest_first:
        tensor = tensors.pop(name)
        site, _, attribute = name.rpartition(".")
        module = model.get_submodule(site)
        placed = tensor.to(device, dtype)
        if attribute not in module._buffers:
            module.register_parameter(attribute, nn.Parameter(placed))
            continue
        if not tensor.is_floating_point():
            placed = tensor.to(device)
        elif isinstance(module, FrozenLayerNorm) and attribute == "calibration":
            placed = as_calibration(placed)
        setattr(module, attribute, placed)


def describe_checkpoint(files: Files, known_ids: int = 0) -> dict[str, Any]:
    """Return its files, format, shape, parameters, dtype, and the range of every norm's weight and bias.

    Every value is read, to find NaN and infinity.

    Args:
        known_ids: as ``read_checkpoint`` takes it.

    Raises:
        CheckpointError, ConfigError, NormError: if the checkpoint would not load.
    """
    checkpoint = read_checkpoint(files, known_ids)
    config, tensors = checkpoint.config, checkpoint.tensors
    copy = dataclasses.replace(checkpoint, tensors=dict(tensors))  # loading takes the tensors
    model = load_model(copy, [], attention="sdpa", arithmetic="fast", device=torch.device("meta"), dtype=None)
    reason = why_not_drafted(model) or why_not(model)
    return {
        "files": str(files.place),
        "format": _format_of(checkpoint, files),
        "layers": config.n_layer,
        "heads": config.n_head,
        "width": config.n_embd,
        "inner width": config.inner_size,
        "context": config.n_positions,
        "vocabulary": config.vocab_size,
        "of it used": config.used_vocab_size or config.vocab_size,
        "activation": config.activation_function,
        "tied head": config.tie_word_embeddings,
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "dtype": dtype_name(model.dtype),
        "norm eps": config.layer_norm_epsilon,
        "norm": _norm_names(checkpoint.norms),
        "norms": {site: _ranges(site, tensors) for site in model.site_names()},
        "not finite": [name for name, _ in model.named_parameters() if not tensors[name].isfinite().all()],
        "decoding": path_of(model),
        "drafts": f"none: {reason}" if reason else "int8, while there is one text",
    }


def _format_of(checkpoint: Checkpoint, files: Files) -> str:
    """Return "Hugging Face, model.safetensors", or the first of several files and the last."""
    if is_gguf(files.place):
        return f"GGUF, {files.place.name}"
    weights = files.weights()
    words = f"{checkpoint.form.name}, {weights[0].name}"
    if len(weights) > 1:
        words += f" to {weights[-1].name}"
    return words


def _ranges(site: str, tensors: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Return the least and the largest value of a norm's weight and bias."""
    ranges = {}
    for name in ("weight", "bias"):
        tensor = tensors.get(f"{site}.{name}")
        if tensor is not None:
            ranges[name] = (tensor.min().item(), tensor.max().item())
    return ranges


def _norm_names(pairs: Pairs) -> str:
    """ "layernorm", or "dyt", or "h.*.ln_1: dyt, ln_f: my_norm.py:MyNorm"."""
    if not pairs:
        return "layernorm"
    names = []
    for pattern, norm in pairs:
        names.append(str(norm) if pattern == "*" else f"{pattern}: {norm}")
    return ", ".join(names)
