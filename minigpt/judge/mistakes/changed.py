"""A model of transformers by another config, and modules whose code calls other functions. All tensors are shared."""

import copy
import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from minigpt.errors import CheckpointError
from minigpt.judge.mistakes.mistake import Mistake, Put, Swaps
from minigpt.precision import default_dtype

OfConfig = Callable[[Any], None]  # changes a config in place


def configured(words: str, change: OfConfig, **about: Any) -> Mistake:
    """Return the mistake that a model of transformers with another config is."""
    return Mistake(words, rebuilt(change), rebuilds=True, **about)


def rebuilt(change: OfConfig) -> Put:
    """Return what puts the modules of a changed config in place of a model's, with the model's own tensors.

    Buffers that no file has, such as rotary frequencies, are made anew.
    """

    def put(model: Any, swaps: Swaps) -> None:
        from transformers.initialization import no_init_weights

        config = copy.deepcopy(model.config)
        change(config.get_text_config())
        with default_dtype(config.dtype or model.dtype), no_init_weights():
            other = type(model)(config).eval()
        known, new = model.state_dict(keep_vars=True), other.state_dict()
        embedding = model.get_input_embeddings().weight
        for name, parameter in other.named_parameters(remove_duplicate=False):
            if name not in known or known[name].shape != parameter.shape:
                raise CheckpointError(f"the model has no {name} for this config")
        for path, module in other.named_modules(remove_duplicate=False):
            for role in (*module._parameters, *module._buffers):
                name, new_one = f"{path}.{role}".lstrip("."), getattr(module, role)
                if name in new:
                    setattr(module, role, known[name])
                elif new_one is not None:
                    dtype = new_one.dtype
                    if new_one.is_floating_point():
                        dtype = torch.promote_types(dtype, embedding.dtype)
                    setattr(module, role, new_one.to(embedding.device, dtype))
        for name, child in other.named_children():
            swaps.set(model, name, child)
        swaps.set(model, "config", config)
        swaps.set(model, "forward", other.forward)

    return put


def code_of(module: nn.Module) -> FunctionType:
    """Return the function that a module's call runs, without its decorators."""
    forward: Any = inspect.unwrap(module.forward)
    return getattr(forward, "__func__", forward)


def calls(module: nn.Module, name: str) -> bool:
    """Return whether a module's forward names a function, or a table of functions, of its file."""
    code = code_of(module)
    return name in code.__code__.co_names and name in code.__globals__


def call_instead(module: nn.Module, swaps: Swaps, name: str, other: Callable[[Any], Any]) -> None:
    """Have a module's forward use something else in place of a function, or a table of functions, of its file.

    Args:
        other: returns that, of the right one.
    """
    code = code_of(module)
    names = code.__globals__ | {name: other(code.__globals__[name])}
    function = FunctionType(code.__code__, names, code.__name__, code.__defaults__, code.__closure__)
    function.__kwdefaults__ = code.__kwdefaults__
    swaps.set(module, "forward", MethodType(function, module))
