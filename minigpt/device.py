"""The device of a model, and a check that its values can be read there."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from minigpt.errors import ConfigError

_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]


def resolve_device(device: str | int | torch.device | None) -> torch.device:
    """Return the device of a name; None is CUDA where there is one, else the CPU.

    Raises:
        ConfigError: if the name is unknown, or that device is not on this machine.
    """
    if device is None and torch.cuda.is_available():
        return torch.device("cuda")
    if device is None:
        return torch.device("cpu")
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"unknown device {device!r}; known are cpu, cuda, cuda:N, mps and meta") from error
    if resolved.type in ("cpu", "meta"):
        return resolved
    backend: Any = getattr(torch, resolved.type, None)
    count = 0
    if backend is not None and backend.is_available():
        count = backend.device_count()
    if (resolved.index or 0) >= count:
        raise ConfigError(
            f"device {str(device)!r} is not on this machine, where PyTorch sees {count}; use --device cpu"
        )
    return resolved


def require_values(device: torch.device) -> None:
    """Refuse to compute where there is nothing to compute with.

    Raises:
        ConfigError: if the device is meta, which holds shapes and no values.
    """
    if device.type == "meta":
        raise ConfigError("device 'meta' holds shapes and no values, so nothing can be computed there; use cpu or cuda")


def has_values(tensor: torch.Tensor) -> bool:
    """Return True if a program may read the tensor's values and branch on them.

    False on the meta device, under a compiler or ``torch.func.vmap``, and while ``torch.jit.trace`` or a CUDA graph
    records the program to repeat it with other values.
    """
    if torch.compiler.is_compiling() or tensor.is_meta or isinstance(tensor, FakeTensor | FunctionalTensor):
        return False
    if torch._C._get_tracing_state() or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    while _functorch.is_functorch_wrapped_tensor(tensor):  # by vmap, grad and their like, the last on the outside
        if _functorch.is_batchedtensor(tensor):
            return False
        tensor = _functorch.get_unwrapped(tensor)
    return True
