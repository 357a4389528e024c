"""Run third-party code; restore and report the process state that it changes."""

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


def _set_deterministic_mode(mode: tuple[bool, bool]) -> None:
    is_on, warns_only = mode
    torch.use_deterministic_algorithms(is_on, warn_only=warns_only)


def _set_autocast(is_on: tuple[bool, bool]) -> None:
    on_cpu, on_cuda = is_on
    torch.set_autocast_enabled("cpu", on_cpu)
    torch.set_autocast_enabled("cuda", on_cuda)


def _set_working_directory(place: str | None) -> None:
    if place is not None:
        os.chdir(place)


PROCESS_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {  # how to read and to restore each
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the default device": (torch.get_default_device, torch.set_default_device),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic mode": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        _set_deterministic_mode,
    ),
    "whether gradients are recorded": (torch.is_grad_enabled, torch.set_grad_enabled),
    "autocast": (
        lambda: (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        _set_autocast,
    ),
    "the precision of float32 products": (product_precision, set_product_precision),
    "the working directory": (_working_directory, _set_working_directory),
    "the seed of PyTorch's random numbers": (torch.initial_seed, lambda _: None),  # restored with their state
}


GENERATORS: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [  # of random numbers: the same of each
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
    (torch.get_rng_state, torch.set_rng_state),
]
CUDA_GENERATORS = (torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all)

_on_import: dict[str, tuple[str, ...]] = {}  # what a module changed when it was imported


@contextlib.contextmanager
def watched(module: str | None = None) -> Iterator[list[str]]:
    """Run third-party code in the block; restore the process's state at its end.

    Yields a list. After the block it names what the code changed, a few words each: settings of PyTorch, the working
    directory, functions of ``torch.nn.functional`` that were replaced. Random number generators are restored too, those
    of CUDA included. They are named only if PyTorch's got another seed: to draw numbers is no mistake.

    Args:
        module: the name of the module that the block imports. ``changed_on_import`` then tells of it later, since a
            module is imported once.
    """
    settings = {name: read() for name, (read, _) in PROCESS_SETTINGS.items()}
    functions = dict(vars(F))
    generators = [*GENERATORS, CUDA_GENERATORS] if torch.cuda.is_initialized() else GENERATORS
    states = [(restore, read()) for read, restore in generators]
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
        for restore, state in states:
            restore(state)
        if module is not None:
            _on_import[module] = tuple(changes)


def changed_on_import(made: object) -> tuple[str, ...]:
    """Return what the module of a class, function or object changed in the process when it was imported."""
    module = getattr(made, "__module__", None)
    if module is None:
        return ()
    return _on_import.get(module, ())
