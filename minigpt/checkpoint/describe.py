"""Describe a checkpoint without building its model."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minigpt.checkpoint.contents import Files
from minigpt.checkpoint.norms import Pairs
from minigpt.checkpoint.opened import read_checkpoint
from minigpt.checkpoint.pretrained import load_model
from minigpt.device import dtype_name
from minigpt.engine.int8 import why_not_drafted
from minigpt.engine.kernel import path_of


def describe(files: Files, known_ids: int = 0) -> dict[str, Any]:
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
    weights, why_not = files.weights(), why_not_drafted(model)
    return {
        "files": str(files.place),
        "format": f"{checkpoint.form.name}, {weights[0].name}" + f" to {weights[-1].name}" * (len(weights) > 1),
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
        "norms": {site: _ranges(site, tensors) for site in model.norm_sites()},
        "not finite": [name for name, _ in model.named_parameters() if not tensors[name].isfinite().all()],
        "decoding": path_of(model),
        "drafts": "int8, while there is one text" if why_not is None else f"none: {why_not}",
    }


def _ranges(site: str, tensors: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Return the least and the largest value of a norm's weight and bias."""
    pairs = {name: tensors.get(f"{site}.{name}") for name in ("weight", "bias")}
    return {name: (tensor.min().item(), tensor.max().item()) for name, tensor in pairs.items() if tensor is not None}


def _norm_names(pairs: Pairs) -> str:
    """ "layernorm", or "dyt", or "h.*.ln_1: dyt, ln_f: my_norm.py:MyNorm"."""
    if not pairs:
        return "layernorm"
    return ", ".join(str(norm) if pattern == "*" else f"{pattern}: {norm}" for pattern, norm in pairs)
