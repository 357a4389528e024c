"""What a checkpoint is, told without computing anything with it."""

from pathlib import Path
from typing import Any

from minigpt.checkpoint import from_pretrained, locate
from minigpt.model import GPT2
from minigpt.placement import dtype_name


def describe(source: str | Path, *, revision: str | None = None) -> dict[str, Any]:
    """Where it lies, its shape, its number of parameters, their dtype, and the range of every norm's weight and bias.

    Raises:
        CheckpointError, ConfigError: it cannot be found, or is not a whole GPT-2.
    """
    place = locate(source, revision=revision)
    model = from_pretrained(place, device="cpu")
    config = model.config
    return {
        "model": str(source),
        "files": str(place),
        "layers": config.n_layer,
        "heads": config.n_head,
        "width": config.n_embd,
        "inner width": config.inner_size,
        "context": config.n_positions,
        "vocabulary": config.vocab_size,
        "activation": config.activation_function,
        "tied head": config.tie_word_embeddings,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": dtype_name(model.wte.weight.dtype),
        "norm eps": config.layer_norm_epsilon,
        "norms": [_norm_ranges(model, site) for site in model.norm_sites()],
    }


def _norm_ranges(model: GPT2, site: str) -> str:
    ranges = (
        f"{name} {parameter.min().item():.4g} to {parameter.max().item():.4g}"
        for name, parameter in model.get_submodule(site).named_parameters()
    )
    return f"{site}: {', '.join(ranges)}"
