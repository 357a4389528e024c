"""Run somebody else's code: undo and name what it changes in the process."""

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from minigpt.precision import product_precision, set_product_precision


def _working_directory() -> str | None:
    with contextlib.suppress(FileNotFoundError):  # it may have been removed
        return os.getcwd()
    return None


PROCESS_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {  # how to read and to restore each
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the default device": (torch.get_default_device, torch.set_default_device),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic mode": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda mode: torch.use_deterministic_algorithms(mode[0], warn_only=mode[1]),
    ),
    "whether gradients are recorded": (torch.is_grad_enabled, torch.set_grad_enabled),
    "autocast": (
        lambda: (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        lambda on: [torch.set_autocast_enabled(*pair) for pair in zip(("cpu", "cuda"), on, strict=True)],
    ),
    "the precision of float32 products": (product_precision, set_product_precision),
    "the working directory": (_working_directory, lambda place: place and os.chdir(place)),
    "the seed of PyTorch's random numbers": (torch.initial_seed, lambda _: None),  # restored with their state
}

_on_import: dict[str, tuple[str, ...]] = {}  # what a module changed when it was imported


@contextlib.contextmanager
def watched(module: str | None = None) -> Iterator[list[str]]:
    """Run somebody else's code in the block; restore the process's state at its end.

    Yields a list. After the block it names what the code changed, a few words each: settings of PyTorch, the working
    directory, functions of ``torch.nn.functional`` that were replaced. Random number generators are restored too, those
    of CUDA included. They are named only if PyTorch's got another seed: to draw numbers is no mistake.

    Args:
        module: the name of the module that the block imports. ``changed_on_import`` then tells of it later, since a
            module is imported once.
    """
    settings = {name: read() for name, (read, _) in PROCESS_SETTINGS.items()}
    functions = dict(vars(F))
    has_cuda = torch.cuda.is_initialized()
    random_numbers = random.getstate(), np.random.get_state(), torch.get_rng_state()
    of_cuda = torch.cuda.get_rng_state_all() if has_cuda else []
    changes: list[str] = []
    try:
        yield changes
    finally:
        for name, function in functions.items():
            if callable(function) and vars(F).get(name) is not function:
                setattr(F, name, function)
                changes.append(f"torch.nn.functional.{name}")
        for name, (read, restore) in PROCESS_SETTINGS.items():
            if read() != settings[name]:
                restore(settings[name])
                changes.append(name)
        random.setstate(random_numbers[0])
        np.random.set_state(random_numbers[1])
        torch.set_rng_state(random_numbers[2])
        if has_cuda:
            torch.cuda.set_rng_state_all(of_cuda)
        if module is not None:
            _on_import[module] = tuple(changes)


def changed_on_import(made: object) -> tuple[str, ...]:
    """Return what the module of a class, function or object changed in the process when it was imported."""
    return _on_import.get(getattr(made, "__module__", None) or "", ())
