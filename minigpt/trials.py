"""Trials: an accelerator is used on a device once it has computed there what the plain path computes.

MINIGPT_ACCELERATORS=0 turns all of them off.
"""

import os
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from minigpt.device import dtype_name

MOST_NOISE = 4  # times the plain path's error; of so few numbers, two correct programs may differ by such a factor


class Compared(NamedTuple):
    """The same numbers by the accelerator, by the plain path, and in float64."""

    given: Tensor
    plain: Tensor
    truth: Tensor


class Trial(NamedTuple):
    """What an accelerator was tried on: the type of the device, the dtype, and the model's width."""

    accelerator: str
    device: str
    dtype: str
    width: int


_deciding = threading.RLock()  # a trial may run another accelerator, which is tried first
_failures: dict[Trial, str | None] = {}  # None if it passed


def are_on() -> bool:
    """Return True if accelerators may be used at all."""
    return os.environ.get("MINIGPT_ACCELERATORS") != "0"


def passes(
    accelerator: str, device: torch.device, dtype: torch.dtype, width: int, attempt: Callable[[], Iterable[Compared]]
) -> bool:
    """Return True if the accelerator may be used. The first call tries it; the process remembers the result.

    The error against float64 must be within the noise floor: ``MOST_NOISE`` times the plain path's error, or times the
    rounding of the result. A failure is one warning, and the caller takes the plain path.
    """
    if not are_on():
        return False
    trial = Trial(accelerator, device.type, dtype_name(dtype), width)
    with _deciding:
        if trial not in _failures:
            failure = _failures[trial] = _failure(attempt, dtype)
            if failure is not None:
                warnings.warn(f"{accelerator} not used on {device}: {failure}", stacklevel=3)
        return _failures[trial] is None


def results() -> dict[Trial, str | None]:
    """Return the trials of this process: None for those that passed, else what failed."""
    return dict(_failures)


def _failure(attempt: Callable[[], Iterable[Compared]], dtype: torch.dtype) -> str | None:
    try:
        for given, plain, truth in attempt():
            error, noise = _rms(given - truth), _rms(plain - truth)
            floor = max(noise, torch.finfo(dtype).eps * _rms(truth))
            if not error <= MOST_NOISE * floor:  # NaN fails too
                return f"its numbers are off by {error:.2g}, {error / floor:.2g} times the noise floor"
    except Exception as error:  # somebody else's compiler, and those that it calls, may raise anything
        inner = getattr(error, "inner_exception", error)  # torch.compile wraps its backend's errors
        return f"{type(inner).__name__}: {str(inner).partition(chr(10))[0]}"
    return None


def _rms(difference: Tensor) -> float:
    return difference.double().square().mean().sqrt().item()
