"""Whose precision an error is like: transformers' own in float32, float16 and bfloat16, on the same prompts."""

import contextlib
import math
from collections.abc import Mapping

import torch

from minigpt.errors import MiniGPTError
from minigpt.judge.measures import Distance
from minigpt.judge.reference import Reference
from minigpt.judge.truth import Truth
from minigpt.precision import dtype_name
from minigpt.report.fields import Precision

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WORK = 1e10  # weights times tokens that are read, but for the first prompt
MOST_WORK = 1e11  # of the first prompt, if that is read without being asked


def read_precisions(truth: Truth, weights: int, *, is_asked: bool = False) -> dict[str, float]:
    """Return the RMS error of transformers' logits in each dtype, by its name; empty for a large model.

    The truth is that of the record: float64 on the weights as its dtype rounds them. transformers computes in the other
    dtype on the same weights, which it rounds further if that dtype is narrower.

    Args:
        weights: how many numbers the model has.
        is_asked: whether to measure a large model too.
    """
    errors = {dtype_name(truth.dtype): truth.noise_floor.rms}
    if weights * len(truth.prompts[0].ids) > MOST_WORK and not is_asked:
        return errors
    for dtype in DTYPES:
        if dtype != truth.dtype:
            with contextlib.suppress(MiniGPTError, RuntimeError):  # a device or a model may not know the dtype
                errors[dtype_name(dtype)] = error_in(truth, dtype, weights)
    return errors


def error_in(truth: Truth, dtype: torch.dtype, weights: int) -> float:
    """Return the RMS error of transformers in a dtype on the first prompts."""
    reference = Reference(truth.place, truth.attention, truth.dtype, truth.device, compute=dtype)
    distance, tokens = Distance(), 0
    for sample in truth.prompts:
        tokens += len(sample.ids)
        if distance.count and tokens * weights > WORK:
            break
        distance.add(reference(truth.tensor(sample.ids))[0], sample.truth)
    return distance.rms


def precision_of(error: float, errors: Mapping[str, float]) -> Precision | None:
    """Return the dtype whose error is nearest to one, by their quotient; None if there is none to compare with."""
    nearest, quotient = None, math.inf
    for name, own in errors.items():
        if not (0 < own < math.inf and 0 < error < math.inf):
            continue
        apart = abs(math.log(error / own))
        if apart < quotient:
            nearest, quotient = Precision(name, error / own), apart
    return nearest
