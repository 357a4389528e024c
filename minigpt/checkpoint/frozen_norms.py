"""Frozen norms in a checkpoint that any program reads as a plain GPT-2, as arXiv 2507.02559 publishes them.

A LayerNorm whose eps is far above every variance divides by sqrt(eps), a constant. So a frozen norm is a LayerNorm with
a huge eps, whose weight is the frozen weight times sqrt(eps) / deviation.
"""

import copy
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from minigpt.errors import NormError
from minigpt.model import GPT2
from minigpt.norms.frozen import FrozenLayerNorm
from minigpt.norms.record import record_of
from minigpt.swap import swap_norms

if TYPE_CHECKING:
    from minigpt.checkpoint.save import SavesItself

EPS = 2.0**40  # its root is a power of two, so multiplying by it rounds nothing; variances below 2**16 vanish beside it
PLAIN = [1.0, 1.0, float("inf")]  # the calibration of a norm that divides by 1


def save_frozen(model: GPT2, directory: str | Path, tokenizer: "SavesItself | None" = None) -> None:
    """Write a model whose norms are all frozen so that transformers alone loads it with the same logits.

    ``minigpt.from_pretrained`` loads what is written with frozen norms again.

    Raises:
        NormError: if ``can_save_frozen`` is False, or a scaled weight is too large for the model's dtype.
        CheckpointError: as ``save_pretrained``.
    """
    from minigpt.checkpoint.save import save_pretrained  # which imports the reading side, and so this file

    if not can_save_frozen(model):
        raise NormError(
            "only a model whose norms are all frozen and divide all positions by one deviation has a plain form; end "
            "the training schedule with a stage first@STEP"
        )
    plain = copy.deepcopy(model)
    plain.config = dataclasses.replace(model.config, layer_norm_epsilon=EPS)
    for site, norm in model.norm_modules().items():
        weight = plain.get_parameter(f"{site}.weight")
        with torch.no_grad():
            weight.copy_(weight.double() * (EPS**0.5 / _deviations(norm)[0]))
        record_of(plain.get_submodule(site)).originals.clear()  # a fitted norm's own scale and shift are saved
        if not weight.isfinite().all():
            raise NormError(
                f"the scaled weight of {site} does not fit into {weight.dtype}; save in float32 or bfloat16"
            )
    swap_norms(plain, "fused")
    save_pretrained(plain, directory, tokenizer)


def can_save_frozen(model: GPT2) -> bool:
    """True if all norms are frozen, and each divides all positions by one deviation."""
    return all(len({*_deviations(norm)}) == 1 for norm in model.norm_modules().values())


def is_frozen(eps: float) -> bool:
    """True if a config's layer_norm_epsilon says that its norms divide by a constant."""
    return eps >= 2.0**20


def unscaled(tensors: dict[str, Tensor], eps: float) -> dict[str, Tensor]:
    """Return the tensors of a plain form as those of frozen norms that divide by 1."""
    plain = dict(tensors)
    for name, weight in tensors.items():
        site, _, parameter = name.rpartition(".")
        if parameter == "weight" and site.rpartition(".")[2] in ("ln_1", "ln_2", "ln_f"):
            plain[name] = weight / eps**0.5
            plain[f"{site}.calibration"] = torch.tensor(PLAIN, dtype=weight.dtype)
    return plain


def is_plain_form(model: GPT2) -> bool:
    """True if the model's norms are frozen and were read from a plain form, so that they divide by 1."""
    found = [getattr(norm, "calibration", None) for norm in model.norm_modules().values()]
    return all(calibration is not None and calibration.tolist() == PLAIN for calibration in found)


def _deviations(norm: nn.Module) -> list[float]:
    """Return what a frozen norm divides the other positions and the first by; nothing if it is not calibrated."""
    if not isinstance(norm, FrozenLayerNorm) or norm.calibration is None:
        return []
    return norm.calibration.tolist()[:2]
