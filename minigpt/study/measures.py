"""What a study measures on a cell's final model beside parity: entropy, calibration, and a user's own functions."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

import minigpt
from minigpt.errors import ConfigError
from minigpt.judge.perplexity import predictions, windows_of
from minigpt.model import GPT2
from minigpt.norms.foreign.construct import naming
from minigpt.norms.foreign.locate import locate

BINS = 15  # of confidence, as Guo et al. (2017)


@torch.inference_mode()
def confidence(model: GPT2, ids: list[int]) -> dict[str, float]:
    """Return the mean entropy in nats of the predictions of a text, and their expected calibration error.

    The calibration error compares how sure the model is of its likeliest token with how often that is the next one. It
    is the mean distance over 15 bins of equal width (Guo et al. 2017, arXiv 1706.04599). Windows are perplexity's.
    """
    entropy, sure, right = [], [], []
    for window in windows_of(len(ids), model.config.n_positions):
        for logits, wanted in predictions(model, ids, *window):
            p = logits.float().softmax(-1)  # (tokens, V)
            likeliest = p.max(-1)
            entropy.append(torch.special.entr(p).sum(-1))
            sure.append(likeliest.values)
            right.append((likeliest.indices == wanted).float())
    return {
        "entropy": float(torch.cat(entropy).mean()),
        "calibration_error": _calibration_error(torch.cat(sure), torch.cat(right)),
    }


def _calibration_error(sure: Float[Tensor, " tokens"], right: Float[Tensor, " tokens"]) -> float:
    """Return the expected calibration error of probabilities and whether each came true, as 1 or 0."""
    bins: Int[Tensor, " tokens"] = (sure * BINS).long().clamp(max=BINS - 1)
    gap = torch.zeros(BINS, dtype=sure.dtype, device=sure.device).index_add_(0, bins, sure - right)
    return float(gap.abs().sum() / len(sure))


def check_metrics(metrics: Sequence[str]) -> None:
    """Check that every metric is a function in a file or a package.

    Raises:
        ConfigError: the message names the metric.
    """
    for metric in metrics:
        if ":" not in metric:
            raise ConfigError(f"a metric must be path/to/file.py:name or package.module:name, got {metric!r}")
        locate(metric)


def measured(metrics: Sequence[str], model: GPT2, tokenizer: minigpt.Tokenizer) -> dict[str, float]:
    """Return what a user's functions of (model, tokenizer) say, by what the study calls them, e.g. "my.py:name".

    Raises:
        NormError: if one raises an error, or does not return a number.
    """
    found: dict[str, float] = {}
    for metric in metrics:
        function: Any = locate(metric)
        with naming(function, metric):
            found[metric] = float(function(model, tokenizer))
    return found
