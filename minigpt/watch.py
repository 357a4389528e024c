"""Watch somebody else's code: undo and name what it changes in the process."""

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from inspect import getattr_static
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as of_all_modules

from minigpt.device import product_precision, set_product_precision

_COMPILER = tuple(str(Path(torch.__file__).with_name(name)) for name in ("_compile.py", "_dynamo"))


class ProcessSetting(NamedTuple):
    """A setting of the process, and how to read and to restore it."""

    name: str
    read: Callable[[], Any]
    restore: Callable[[Any], object]


def _working_directory() -> str | None:
    with contextlib.suppress(FileNotFoundError):  # it may have been removed
        return os.getcwd()
    return None


PROCESS_SETTINGS = (
    ProcessSetting("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    ProcessSetting("the default device", torch.get_default_device, torch.set_default_device),
    ProcessSetting("the number of threads", torch.get_num_threads, torch.set_num_threads),
    ProcessSetting(
        "deterministic mode",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda mode: torch.use_deterministic_algorithms(mode[0], warn_only=mode[1]),
    ),
    ProcessSetting("whether gradients are recorded", torch.is_grad_enabled, torch.set_grad_enabled),
    ProcessSetting(
        "autocast",
        lambda: (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        lambda on: [torch.set_autocast_enabled(*pair) for pair in zip(("cpu", "cuda"), on, strict=True)],
    ),
    ProcessSetting("the precision of float32 products", product_precision, set_product_precision),
    ProcessSetting("the working directory", _working_directory, lambda place: place and os.chdir(place)),
    ProcessSetting(
        "the seed of PyTorch's random numbers", torch.initial_seed, lambda _: None
    ),  # restored with their state
)

# What the norm of a GPT-2 and the model around it call.
NAMESPACES: dict[str, Any] = {
    "torch": torch, "torch.nn.functional": F, "torch.Tensor": torch.Tensor, "torch.nn.Module": nn.Module,
    "torch.nn.LayerNorm": nn.LayerNorm, "torch.nn.RMSNorm": nn.RMSNorm, "torch.nn.Linear": nn.Linear,
    "torch.nn.Embedding": nn.Embedding,
}  # fmt: skip
HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")

_on_import: dict[str, tuple[str, ...]] = {}  # what a module changed when it was imported


@contextlib.contextmanager
def watched(module: str | None = None) -> Iterator[list[str]]:
    """Run somebody else's code in the block; restore the process's state at its end.

    Yields a list. After the block it names what the code changed, a few words each: settings of PyTorch, the working
    directory, functions of PyTorch that were replaced, hooks on all modules. Random number generators are restored
    too, and are named only if PyTorch's got another seed: to draw numbers is no mistake.

    Args:
        module: the name of the module that the block imports. ``changed_on_import`` then tells of it later, since a
            module is imported once.
    """
    settings = [(setting, setting.read()) for setting in PROCESS_SETTINGS]
    functions = {name: _functions(space) for name, space in NAMESPACES.items()}
    hooks = {name: dict(getattr(of_all_modules, name)) for name in HOOKS}
    random_numbers = random.getstate(), np.random.get_state(), torch.get_rng_state()
    changes: list[str] = []
    try:
        yield changes
    finally:
        for name, before in functions.items():
            changes += [f"{name}.{function}" for function in _put_back(NAMESPACES[name], before)]
        for setting, value in settings:
            if setting.read() != value:
                setting.restore(value)
                changes.append(setting.name)
        for name, before in hooks.items():
            if (present := getattr(of_all_modules, name)).keys() != before.keys():
                present.clear()
                present.update(before)
                changes.append("the hooks of all modules")
        random.setstate(random_numbers[0])
        np.random.set_state(random_numbers[1])
        torch.set_rng_state(random_numbers[2])
        if module is not None:
            _on_import[module] = tuple(changes)


def changed_on_import(made: object) -> tuple[str, ...]:
    """Return what the module of a class, function or object changed in the process when it was imported."""
    return _on_import.get(getattr(made, "__module__", None) or "", ())


def _functions(space: Any) -> dict[str, Any]:
    """Return the public functions of a module, or all methods of a class, also those that it inherits."""
    if isinstance(space, type):
        return {name: getattr_static(space, name) for name in dir(space)}
    return {name: value for name, value in vars(space).items() if name[0] != "_" and _is_function(value)}


def _is_function(value: object) -> bool:
    return callable(value) and not isinstance(value, type)


def _put_back(space: Any, before: dict[str, Any]) -> list[str]:
    """Put functions back that were replaced in a module or class; return their names."""
    replaced = []
    after = _functions(space)
    for name, value in before.items():
        if (present := after.get(name)) is value or _is_of_compiler(present):
            continue
        if isinstance(space, type) and any(name in vars(base) for base in space.__mro__[1:]) and name in vars(space):
            delattr(space, name)
        if getattr_static(space, name, None) is not value:
            setattr(space, name, value)
        replaced.append(name)
    return replaced


def _is_of_compiler(function: Any) -> bool:
    """Return True for a function with which PyTorch's compiler replaces one of PyTorch's when it is first used."""
    return getattr(getattr(function, "__code__", None), "co_filename", "").startswith(_COMPILER)
