"""What PyTorch is set to for a whole process, which a norm reads and should not change."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

AUTOCAST = ("cpu", "cuda")


def set_autocast(enabled: Sequence[bool]) -> None:
    """On or off for each kind of device in ``AUTOCAST``."""
    for kind, is_enabled in zip(AUTOCAST, enabled, strict=True):
        torch.set_autocast_enabled(kind, is_enabled)


# How each is read, and how it is put back
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "PyTorch's random numbers": (torch.get_rng_state, torch.set_rng_state),
    "PyTorch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "PyTorch's autocast": (lambda: [torch.is_autocast_enabled(kind) for kind in AUTOCAST], set_autocast),
    "whether PyTorch keeps gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
}


def settings() -> dict[str, Any]:
    """What they are now."""
    return {name: read() for name, (read, _) in SETTINGS.items()}


def changed_settings(before: dict[str, Any]) -> list[str]:
    """Those that are no longer what they were."""
    same = {name: torch.equal(now, before[name]) if isinstance(now, torch.Tensor) else now == before[name]
            for name, now in settings().items()}  # fmt: skip
    return [name for name in same if not same[name]]


@contextlib.contextmanager
def settings_kept() -> Iterator[None]:
    """Afterwards they are what they were before, whatever was done to them."""
    before = settings()
    try:
        yield
    finally:
        for name, (_, restore) in SETTINGS.items():
            restore(before[name])
