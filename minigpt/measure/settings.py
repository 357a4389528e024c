"""PyTorch's settings for the whole process: read them, put them back, and compute without shortcuts."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

AUTOCAST = ("cpu", "cuda")


def set_autocast(enabled: Sequence[bool]) -> None:
    """Switch autocast on or off for each kind of device in ``AUTOCAST``."""
    for kind, is_enabled in zip(AUTOCAST, enabled, strict=True):
        torch.set_autocast_enabled(kind, is_enabled)


# How to read each setting, and how to restore it
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "PyTorch's random numbers": (torch.get_rng_state, torch.set_rng_state),
    "PyTorch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "PyTorch's autocast": (lambda: [torch.is_autocast_enabled(kind) for kind in AUTOCAST], set_autocast),
    "whether PyTorch keeps gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
}


def settings() -> dict[str, Any]:
    """Return the present value of each setting."""
    return {name: read() for name, (read, _) in SETTINGS.items()}


def changed_settings(before: dict[str, Any]) -> list[str]:
    """Return the names of the settings that differ from ``before``."""
    same = {name: torch.equal(now, before[name]) if isinstance(now, torch.Tensor) else now == before[name]
            for name, now in settings().items()}  # fmt: skip
    return [name for name in same if not same[name]]


@contextlib.contextmanager
def settings_kept() -> Iterator[None]:
    """Restore every setting at the end."""
    before = settings()
    try:
        yield
    finally:
        for name, (_, restore) in SETTINGS.items():
            restore(before[name])


@contextlib.contextmanager
def full_products() -> Iterator[None]:
    """Compute float32 products in full: no TF32 on a GPU, no bfloat16 on a CPU, no autocast on either.

    PyTorch has an old and a new setting for this. Reading the old one raises an error while the two differ.
    """
    backends: Any = torch.backends
    products = [backends.cuda.matmul, backends.mkldnn.matmul]
    newer, older = [backend.fp32_precision for backend in products], None
    with contextlib.suppress(RuntimeError):  # the two differ already
        older = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(older or ("high" if newer[0] == "tf32" else "highest"))
        for backend, precision in zip(products, newer, strict=True):
            backend.fp32_precision = precision
