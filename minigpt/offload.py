"""Parameters whose values are elsewhere: accelerate offloads a module's, and FSDP2 shards them between processes.

A placeholder stands in the module then. Here are its values, a copy that needs neither library, and what gives
a new module the inputs of the old.
"""

import contextlib
import copy
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from minigpt.errors import NormError

HOOK = "_hf_hook"  # accelerate's, which brings a module's Parameters for a call
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_COMPILED = "_orig_mod"  # the module that torch.compile wraps
CHECKPOINTED, SHARDED = "_checkpoint_wrapped_module", "_fsdp_wrapped_module"  # and that PyTorch's other wrappers hold
TRANSPARENT = (_COMPILED, CHECKPOINTED, SHARDED)  # names in a path that a user does not write
SHARDS = "_get_fsdp_state"  # a method of what ``fully_shard`` has made of a module


def uncompiled(path: str) -> str:
    """Return a path, or a Parameter's name, without what ``torch.compile`` and PyTorch's wrappers put into it."""
    return ".".join(name for name in path.split(".") if name not in TRANSPARENT)


def is_sharded(tensor: Tensor) -> bool:
    """Return True for a DTensor, of which this process may hold a part only."""
    return hasattr(tensor, "device_mesh")


def is_offloaded(module: nn.Module) -> bool:
    """Return whether accelerate brings the module's own Parameters for each call, and takes them away after it."""
    return any(hook.offload for hook in device_hooks(module))


def device_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks of accelerate that move a module's inputs and Parameters to a device."""
    hook = vars(module).get(HOOK)
    hooks = getattr(hook, "hooks", [hook])  # several in one
    return [hook for hook in hooks if hasattr(hook, "offload")]


def device_of(module: nn.Module) -> torch.device:
    """Return the device on which a module computes: with its Parameters offloaded, that to which they are brought."""
    for hook in device_hooks(module):
        if hook.offload and hook.execution_device is not None:
            return torch.device(hook.execution_device)
    return next(module.parameters()).device


def values_of(module: nn.Module, *, gathering: bool = True) -> dict[str, Tensor]:
    """Return the values of a module's Parameters and buffers, by name. What is on the device "meta" as a whole stays.

    Args:
        gathering: whether to gather what is sharded, which every process must do then; else there are zeros.
    """
    values: dict[str, Tensor] = {}
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        with torch.inference_mode(False), torch.no_grad(), _brought(part):
            for name, tensor in _own_tensors(part):
                values[prefix + name] = _whole(tensor.detach(), gathering)
    return values


@contextlib.contextmanager
def _brought(module: nn.Module) -> Iterator[None]:
    """Have the values of a module's own Parameters in it in the block."""
    if not is_offloaded(module):
        yield
        return
    from accelerate.utils import align_module_device

    with align_module_device(module):
        yield


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return itertools.chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))


def _whole(tensor: Any, gathering: bool) -> Tensor:
    """Return a tensor whose values are all here."""
    if not is_sharded(tensor):
        return tensor
    if gathering:
        return tensor.full_tensor()
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.to_local().device)


def is_elsewhere(module: nn.Module) -> bool:
    """Return whether values of a module, or of one in it, are offloaded or sharded."""
    for part in module.modules():
        if is_offloaded(part) or any(is_sharded(tensor) for _, tensor in _own_tensors(part)):
            return True
    return False


def plain_copy(module: nn.Module, *, gathering: bool = True) -> Any:
    """Return a copy of a module that has its values and no forward hooks; what these are bound to is not copied.

    A hook of accelerate replaces the module's forward. The copy has the forward from before.

    Args:
        gathering: as for ``values_of``.
    """
    memo: dict[int, Any] = {}  # what is taken in place of a copy
    if is_elsewhere(module):
        values = values_of(module, gathering=gathering)
        for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
            memo[id(tensor)] = _like(tensor, values[name].clone())
    for part in module.modules():
        state = vars(part)
        for name in HOOKS:
            memo[id(state[name])] = OrderedDict()
        for name, value in state.items():
            if HOOK in state and name in (HOOK, "forward"):
                memo[id(value)] = None
    copied = copy.deepcopy(module, memo)
    for part in copied.modules():
        if HOOK in vars(part):
            _remove_hook(part)
    return copied


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    """Return a value as a Parameter, if a tensor is one."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(value, requires_grad=tensor.requires_grad)
    return value


def _remove_hook(module: nn.Module) -> None:
    """Remove what accelerate put on the original of a copied module."""
    state = vars(module)
    state.pop(HOOK)
    state.pop("forward", None)
    before = state.pop("_old_forward", None)
    if before is not None:
        module.forward = before


def take_inputs_of(new: nn.Module, old: nn.Module) -> None:
    """Have a new module get its inputs where accelerate brings the old one's. Its Parameters stay on the device."""
    for hook in device_hooks(old):
        from accelerate.hooks import AlignDevicesHook, add_hook_to_module

        moves = AlignDevicesHook(
            hook.execution_device,
            io_same_device=hook.io_same_device,
            place_submodules=True,
            skip_keys=hook.skip_keys,
        )
        add_hook_to_module(new, moves, append=True)


def require_unsharded(model: nn.Module) -> None:
    """Check that a model is not sharded.

    Raises:
        NormError: if it is.
    """
    is_unit = any(hasattr(type(module), SHARDS) for module in model.modules())  # also after a call
    if is_unit or any(map(is_sharded, model.parameters())):
        raise NormError("the model is sharded; swap and fit norms before that, e.g. before fully_shard")
