"""A model with frozen norms as a plain GPT-2, which any program reads.

A LayerNorm whose eps is far above every variance divides by sqrt(eps), a constant. So a frozen norm is a LayerNorm
whose weight is the frozen weight times sqrt(eps) / deviation, as arXiv 2507.02559 publishes such models.
``checkpoint/norms.py`` takes it for a frozen norm again.
"""

import copy
import dataclasses
from pathlib import Path

import torch
from torch import nn

from minigpt.checkpoint.save import SavesItself, save_pretrained
from minigpt.errors import NormError
from minigpt.model import GPT2
from minigpt.norms.frozen import FrozenLayerNorm
from minigpt.norms.record import record_of
from minigpt.swap import swap_norms

# Its root is a power of two, so that multiplying by the root rounds nothing. Variances below 2**16 vanish in the sum.
FROZEN_EPS = 2.0**40


def save_frozen(model: GPT2, directory: str | Path, tokenizer: SavesItself | None = None) -> None:
    """Write a model whose norms are all frozen so that transformers alone loads it with the same logits.

    ``minigpt.from_pretrained`` loads what is written with frozen norms again.

    Raises:
        NormError: if ``can_save_frozen`` is False, or a scaled weight is too large for the model's dtype.
        CheckpointError: as ``save_pretrained``.
    """
    if not can_save_frozen(model):
        raise NormError(
            "only a model whose norms are all frozen and divide all positions by one deviation has a plain form; end "
            "the training schedule with a stage first@STEP"
        )
    plain = copy.deepcopy(model)
    plain.config = dataclasses.replace(model.config, layer_norm_epsilon=FROZEN_EPS)
    for site, norm in model.norm_modules().items():
        deviation = only_deviation(norm)
        assert deviation is not None
        weight = plain.get_parameter(f"{site}.weight")
        with torch.no_grad():
            weight.copy_(weight.double() * (FROZEN_EPS**0.5 / deviation))
        record_of(plain.get_submodule(site)).originals.clear()  # a fitted norm's own scale and shift are saved
        if not weight.isfinite().all():
            raise NormError(
                f"the scaled weight of {site} does not fit into {weight.dtype}; save in float32 or bfloat16"
            )
    swap_norms(plain, "fused")
    for norm in plain.norm_modules().values():
        norm.eps = FROZEN_EPS  # type: ignore[assignment]
    save_pretrained(plain, directory, tokenizer)


def can_save_frozen(model: GPT2) -> bool:
    """True if all norms are frozen, and each divides all positions by one deviation."""
    return all(only_deviation(norm) is not None for norm in model.norm_modules().values())


def only_deviation(norm: nn.Module) -> float | None:
    """Return the constant that a norm divides every position by; None if it is no such norm, or has no constant yet."""
    if type(norm) is not FrozenLayerNorm or norm.calibration is None:  # a tapered norm is more than a constant
        return None
    usual, first = norm.calibration.tolist()
    return usual if usual == first else None
