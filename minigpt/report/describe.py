"""Describe a checkpoint, and why it would not load, without building its model."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minigpt.checkpoint import (
    Checkpoint,
    config_file,
    folder_of,
    has_tokenizer,
    local_place,
    open_checkpoint,
    read_tensors,
    weight_files,
)
from minigpt.checkpoint.norms import Pairs
from minigpt.checkpoint.opened import only_dtype, require_fitting
from minigpt.checkpoint.pretrained import loadable, put_norms
from minigpt.config import GPT2Config
from minigpt.device import DTYPES, dtype_name
from minigpt.engine import accelerate
from minigpt.engine.int8 import why_not_drafted
from minigpt.engine.kernel import path_of
from minigpt.errors import MiniGPTError, listing
from minigpt.model import GPT2
from minigpt.report.numerals import brief
from minigpt.tokenizer import Tokenizer


def describe(source: str | Path, *, revision: str | None = None) -> dict[str, Any]:
    """Return its files, format, shape, parameters, dtype, tokenizer, and the range of every norm's weight and bias.

    ``refused`` lists why ``from_pretrained`` would refuse it; it is empty if it would load. Facts that cannot be read
    are left out. Every value is read, to find NaN and infinity.

    Raises:
        CheckpointError: if it cannot be found.
    """
    place = local_place(source, revision=revision)
    refused: list[str] = []
    facts = {"model": str(source), "files": str(place), "tokenizer": _tokenizer(folder_of(place), None)}
    try:
        checkpoint = open_checkpoint(place)
        facts |= _facts(checkpoint, refused)
        facts["tokenizer"] = _tokenizer(folder_of(place), checkpoint.config.vocab_size)
    except MiniGPTError as error:
        refused.append(str(error))
        facts |= _parts(place)
    return facts | {"refused": refused}


def _facts(checkpoint: Checkpoint, refused: list[str]) -> dict[str, Any]:
    config, tensors, place = checkpoint.config, checkpoint.tensors, checkpoint.place
    with torch.device("meta"):
        model = accelerate(GPT2(config))

    def require_tensors() -> None:
        put_norms(model, checkpoint, asked=[])
        require_fitting(tensors, loadable(model, checkpoint), place)

    for require in (require_tensors, lambda: only_dtype(tensors, place)):
        try:
            require()
        except MiniGPTError as error:
            refused.append(str(error))
    numbers = {name: tensor for name, tensor in tensors.items() if tensor.dtype in DTYPES.values()}
    return {
        "format": f"{checkpoint.form.name}, {_files(place)}",
        **_shape(config),
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "dtype": _dtypes(tensors),
        "norm eps": config.layer_norm_epsilon,
        "norm": _norm_names(checkpoint.norms),
        "norms": [_norm_ranges(site, tensors) for site in model.norm_sites()],
        "not finite": [
            name for name, _ in model.named_parameters() if name in numbers and not numbers[name].isfinite().all()
        ],
        "decoding": path_of(model.to(next((tensor.dtype for tensor in numbers.values()), None)).eval()),
        "drafts": "int8, while there is one text" if (reason := why_not_drafted(model)) is None else f"none: {reason}",
    }


def _parts(place: Path) -> dict[str, Any]:
    """Return facts about a checkpoint that cannot be opened: about its config, or its tensors, if one is whole."""
    facts: dict[str, Any] = {}
    with suppress(MiniGPTError):
        facts |= _shape(GPT2Config.from_json_file(config_file(place)))
    with suppress(MiniGPTError):
        tensors = read_tensors(place)
        facts |= {"format": _files(place), "tensors": len(tensors), "dtype": _dtypes(tensors)}
    return facts


def _shape(config: GPT2Config) -> dict[str, Any]:
    return {
        "layers": config.n_layer,
        "heads": config.n_head,
        "width": config.n_embd,
        "inner width": config.inner_size,
        "context": config.n_positions,
        "vocabulary": config.vocab_size,
        "of it used": config.used_vocab_size or config.vocab_size,
        "activation": config.activation_function,
        "tied head": config.tie_word_embeddings,
    }


def _files(place: Path) -> str:
    files = weight_files(place)
    return files[0].name if len(files) == 1 else f"{len(files)} files from {files[0].name} to {files[-1].name}"


def _dtypes(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(sorted({dtype_name(tensor.dtype) for tensor in tensors.values()}))


def _norm_ranges(site: str, tensors: Mapping[str, Tensor]) -> str:
    """ "h.0.ln_1: weight 0.7 to 1.2, bias -0.1 to 0.1"."""
    found = {name: tensors.get(f"{site}.{name}") for name in ("weight", "bias")}
    ranges = (
        f"{name} {brief(tensor.min().item())} to {brief(tensor.max().item())}"
        for name, tensor in found.items()
        if tensor is not None and tensor.numel() and tensor.dtype in DTYPES.values()
    )
    return f"{site}: {', '.join(ranges)}"


def _norm_names(pairs: Pairs) -> str:
    """ "layernorm", or "dyt", or "h.*.ln_1: dyt, ln_f: my_norm.py:MyNorm"."""
    if not pairs:
        return "layernorm"
    return ", ".join(str(norm) if pattern == "*" else f"{pattern}: {norm}" for pattern, norm in pairs)


def _tokenizer(folder: Path, vocab_size: int | None) -> str:
    """ "none", or the number of its tokens, and which of them the model has no embedding for."""
    if not has_tokenizer(folder):
        return "none"
    try:
        vocabulary = Tokenizer.from_pretrained(folder).backend.get_vocab()
    except MiniGPTError as error:
        return f"refused: {error}"
    beyond = [token for token, number in vocabulary.items() if vocab_size is not None and number >= vocab_size]
    lacking = f"; the model has no embedding for {listing(beyond)}" if beyond else ""
    return f"byte-level BPE of {len(vocabulary)} tokens{lacking}"
