"""Notice of changes to a model while a kernel decodes it."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

WATCHED = ("config", "attention", "eps", "scale", "act")  # attributes whose values the kernel was given


class ModuleEntries:
    """Entries in the dicts of modules: each dict, and the name in it."""

    def __init__(self) -> None:
        self.owners: list[dict[str, Any]] = []
        self.names: list[str] = []

    def add(self, owner: Any, name: str) -> None:
        self.owners.append(owner)
        self.names.append(name)

    def values(self) -> list[Any]:
        # A map, since a step of a small model takes a fifth of a millisecond.
        return list(map(dict.get, self.owners, self.names))


class Snapshot:
    """All that a kernel relies on in a model. While it stays as it is, the kernel computes what the modules compute.

    It holds which module is at every place, the attributes of ``WATCHED``, whether the model trains, the address of
    every Parameter, buffer and int8 weight, and the dicts of forward hooks.

    Args:
        has_copies: the kernel has copies of tensors, so a tensor that is changed in place counts too.
    """

    def __init__(self, model: nn.Module, has_copies: bool) -> None:
        self.has_copies = has_copies
        self.parts, self.tensors = ModuleEntries(), ModuleEntries()
        self.hooks: list[Mapping[int, Any]] = []
        self.parts.add(vars(model), "training")
        self.parts.add(model._modules, "lm_head")
        for module in model.modules():
            self._add(module)
        self.state = self._state()

    def _add(self, module: nn.Module) -> None:
        attributes = vars(module)
        for name in module._modules:
            self.parts.add(module._modules, name)
        for name in WATCHED:
            if name in attributes:
                self.parts.add(attributes, name)
        for contents in (module._parameters, module._buffers):
            for name, tensor in contents.items():
                places = self.parts if tensor is None else self.tensors
                places.add(contents, name)
        if "panels" in attributes:
            self.tensors.add(attributes, "panels")
        self.hooks += [module._forward_hooks, module._forward_pre_hooks]

    def is_outdated(self) -> bool:
        """Return True if the model is not what it was: a part was replaced, or a hook was added."""
        if any(self.hooks):
            return True
        try:
            return self.state != self._state()
        except TypeError:  # a tensor is None now
            return True

    def _state(self) -> tuple[list[Any], list[int], list[int]]:
        """Return the parts, the addresses of the tensors, and with copies the tensors' versions."""
        tensors = self.tensors.values()
        addresses = list(map(Tensor.data_ptr, tensors))
        versions: list[int] = []
        if self.has_copies:
            versions = list(map(version_of, tensors))
        return self.parts.values(), addresses, versions


def version_of(tensor: Tensor) -> int:
    """Return a number that grows when a tensor is changed in place; 0 for an inference tensor, which has none."""
    if tensor.is_inference():
        return 0
    return tensor._version
