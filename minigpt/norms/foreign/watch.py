"""Hold somebody else's norm to what a norm does, and say whose error it was when it fails."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from minigpt.errors import RAISED, MiniGPTError, NormError
from minigpt.norms.foreign.construct import source_file, title
from minigpt.norms.foreign.locate import last_line


class Watched:
    """A module's ``forward``, whose errors name the module, and whose output must be like its input."""

    def __init__(self, module: nn.Module, notes: tuple[str, ...]) -> None:
        self.module, self.compute, self.notes = module, module.forward, notes

    def __call__(self, x: Tensor, *more: Any, **named: Any) -> Any:
        if more or named:  # its own ``add_norm`` may ask it for more than a model does
            return self.compute(x, *more, **named)
        return watched(self.module, self.compute, x)


class WatchedSum:
    """A module's ``add_norm``, held to the same."""

    def __init__(self, module: Any) -> None:
        self.module, self.compute = module, module.add_norm
        try:
            inspect.signature(self.compute).bind(None, None)
        except TypeError as error:
            raise NormError(f"add_norm of {title(module)} cannot be called with (residual, delta): {error}") from error
        except ValueError:  # it has no signature to read, and its first call tells
            pass

    def __call__(self, residual: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """The sum and its norm.

        Raises:
            NormError: it raises, or the two are not of the sum's shape, dtype and device.
        """
        if torch.compiler.is_compiling():
            return self.compute(residual, delta)
        found = _answer(self.module, self.compute, residual, delta)
        if not (isinstance(found, tuple) and len(found) == 2):
            raise NormError(f"add_norm of {title(self.module)} does not return the sum and its norm, as a pair")
        wider = residual if residual.dtype == torch.promote_types(residual.dtype, delta.dtype) else delta
        for tensor in found:
            _require_like(tensor, wider, self.module)
        return found


def watched(module: nn.Module, compute: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    """``compute(x)``, checked.

    Raises:
        NormError: it raises, or its output has another shape, dtype or device than its input.
    """
    if torch.compiler.is_compiling():
        return compute(x)  # traced once, and what it raises there is the compiler's to handle
    y = _answer(module, compute, x)
    _require_like(y, x, module)
    return y


def _answer(module: nn.Module, compute: Callable[..., Any], *given: Tensor) -> Any:
    try:
        return compute(*given)
    except (MiniGPTError, torch.OutOfMemoryError):
        raise
    except RAISED as error:
        where = last_line(error, source_file(module))
        what = f"an input of {tuple(given[0].shape)} in {str(given[0].dtype).removeprefix('torch.')}"
        raise NormError(f"{title(module)} raised {where} on {what}") from error


def _require_like(y: Any, x: Tensor, module: nn.Module) -> None:
    if not isinstance(y, Tensor):
        raise NormError(f"{title(module)} returns a {type(y).__name__}, where a norm returns one tensor")
    if y.layout != x.layout:
        raise NormError(f"{title(module)} returns a tensor that is {str(y.layout).removeprefix('torch.')}, not strided")
    if y.shape != x.shape:
        raise NormError(f"{title(module)} changes the shape: {tuple(x.shape)} went in, {tuple(y.shape)} came out")
    if y.device != x.device:
        raise NormError(f"{title(module)} changes the device: {x.device} went in, {y.device} came out")
    if y.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):  # autocast widens what a norm returns
        raise NormError(f"{title(module)} changes the dtype: {x.dtype} went in, {y.dtype} came out")
