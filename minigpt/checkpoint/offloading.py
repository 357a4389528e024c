"""Models whose weights stay in their files: transformers and accelerate bring those of one module at a time.

A weight is read in place from its safetensors file, rounded to the model's dtype, and cast to the dtype in which the
model computes. Experts that a file does not have as the model needs them are written to a temporary folder.
What transformers keeps in another dtype stays in it, as tables of angles.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minigpt.checkpoint.contents import Files
from minigpt.checkpoint.sizes import shapes_in
from minigpt.choices import GPT2_TYPE, MINIGPT_TYPE, bytes_of
from minigpt.errors import CheckpointError, listing
from minigpt.files import file_state
from minigpt.offload import device_hooks
from minigpt.precision import HALVES, dtype_name

MOST_SHARE = 0.5  # of the memory that is free, which a model may take
GROUP = Path("/sys/fs/cgroup")  # of Linux: what a container may take, and has taken

PROJECTION = "h.0.attn.c_attn.weight"  # of a GPT-2: (C, 3C)
NEEDED_TENSORS = (PROJECTION, "h.0.attn.c_attn.bias", "h.0.ln_1.weight", "h.0.ln_1.bias", "ln_f.weight", "ln_f.bias")


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free: on a device, or in this machine or container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil  # which accelerate brings

    free = psutil.virtual_memory().available
    limit, used = _number_in(GROUP / "memory.max"), _number_in(GROUP / "memory.current")
    if limit is not None and used is not None:
        free = min(free, max(0, limit - used))
    return free


def _number_in(file: Path) -> int | None:
    """Return the number that is a file's content, if it is one."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def may_take(memory: str | int | None, device: torch.device) -> int:
    """Return the bytes that a model may take: those that are asked for, else half of those that are free.

    Raises:
        ConfigError: if what is asked for is no size.
    """
    if memory is None:
        return int(MOST_SHARE * free_memory(device))
    return bytes_of(memory)


def why_whole(files: Files) -> str | None:
    """Return why the weights of a GPT-2 cannot stay in its files, in words; None if they can.

    transformers reads them block by block. So they must be in safetensors files, under the names that it knows.
    """
    if files.place.is_file():
        return f"{files.place.name} is a file of weights, and transformers opens a folder"
    if files.folder != files.place:
        return "a save of it was cut short"
    kind = None if files.config is None else files.config.get("model_type")
    if kind == MINIGPT_TYPE:
        return "its config.json names norms of minigpt, which transformers does not know"
    if kind != GPT2_TYPE:
        return "its config.json does not name its model_type"
    shapes: dict[str, list[int]] = {}
    for file in files.weights():
        if file.suffix != ".safetensors":
            return f"{file.name} is no safetensors file"
        for name, shape in shapes_in(file).items():
            shapes[name.removeprefix("transformer.")] = shape
    lacking = [name for name in NEEDED_TENSORS if name not in shapes]
    if lacking:
        return f"it has no {listing(lacking)}, by the names of transformers"
    shape = shapes[PROJECTION]
    if len(shape) != 2 or shape[1] != 3 * shape[0]:
        return f"{PROJECTION} has shape {tuple(shape)}, which is not transformers'"
    return None


def device_map_of(model: nn.Module, device: torch.device, room: int = 0) -> dict[str, str]:
    """Return a ``device_map`` of a model: a device has what has no matrix, as norms; the disk has the rest.

    Args:
        model: may be on the device "meta".
        room: the bytes that the CPU may hold. The first matrices for which there is room are there.
    """
    places: dict[str, str] = {}
    of_matrices: dict[nn.Parameter, str] = {}  # a tied head has the embedding's

    def place(path: str, module: nn.Module) -> None:
        nonlocal room
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not tensors:
            for name, child in module.named_children():
                place(f"{path}.{name}".lstrip("."), child)
            return
        places[path] = str(device)
        matrices = [parameter for parameter in module.parameters() if parameter.ndim > 1]
        if not matrices:
            return
        size = sum(tensor.nbytes for tensor in module.parameters())
        if matrices[0] in of_matrices:
            places[path] = of_matrices[matrices[0]]
        elif size <= room:
            room -= size
            places[path] = "cpu"
        else:
            places[path] = "disk"
        of_matrices.update(dict.fromkeys(matrices, places[path]))

    place("", model)
    return places


class WatchedWeights(Mapping[str, Tensor]):
    """Weights by their names, which are read as somebody asks for them.

    Args:
        weights: accelerate's, which read from files.
        files: those that must not change meanwhile.
        tied: names of weights that are others, by these. The files may have either name, and transformers below 5.13
            leaves the first out of ``weights``.
    """

    def __init__(self, weights: Mapping[str, Tensor], files: list[Path], tied: Mapping[str, str] | None = None) -> None:
        self.weights, self.states = weights, {file: file_state(file) for file in files}
        self.sources: dict[str, str] = {}
        names = {*weights}
        for name, source in (tied or {}).items():
            if name not in names:
                self.sources[name] = source
            elif source not in names:
                self.sources[source] = name

    def __getitem__(self, name: str) -> Tensor:
        self._require_unchanged()
        try:
            with torch._C.DisableTorchFunction():  # a weight is rounded to its dtype whatever the block computes in
                return self.weights[self.sources.get(name, name)]
        finally:  # also in place of an error
            self._require_unchanged()

    def _require_unchanged(self) -> None:
        for file, state in self.states.items():
            if file_state(file) != state:
                raise CheckpointError(f"{file} was written to while it was read; start again when nothing writes to it")

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def watched_weights(model: nn.Module, place: Path) -> WatchedWeights | None:
    """Put ``WatchedWeights`` in the place of a model's weights on disk, and return them; None if none is on disk."""
    watched: WatchedWeights | None = None
    for module in model.modules():
        for hook in device_hooks(module):
            weights = getattr(hook, "weights_map", None)
            if not hook.offload or weights is None:
                continue
            if watched is None:
                _keep_dtypes(model, getattr(weights.dataset, "index", {}))
                tied: Any = getattr(model, "all_tied_weights_keys", None)
                watched = WatchedWeights(weights.dataset, sorted(place.glob("*.safetensors")), tied)
            weights.dataset = watched
    return watched


def can_round_later(model: Any, dtype: torch.dtype, stored: torch.dtype) -> bool:
    """Return whether a model of float32 files may be opened in float32, and rounded to a narrower dtype as it is read.

    transformers would read and cast every weight as it opens the model, and the files would count as memory. A model
    that keeps some modules in float32 has other dtypes than ``round_like`` knows.
    """
    if stored != torch.float32 or dtype not in HALVES:
        return False
    names = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    return not any(getattr(model, name, None) for name in names)


def round_like(model: Any, like: Any) -> None:
    """Give a model the dtypes of another one of its class, which may be on the device "meta"."""
    dtypes: dict[str, torch.dtype] = {}
    for name, tensor in like.state_dict(keep_vars=True).items():
        dtypes[name] = tensor.dtype
    for name, buffer in like.named_buffers():
        dtypes[name] = buffer.dtype
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor.data = tensor.data.to(dtypes[name])
    for module in model.modules():
        for hook in device_hooks(module):
            weights = getattr(getattr(hook, "weights_map", None), "dataset", None)
            for name, entry in getattr(weights, "index", {}).items():  # of accelerate, which rounds as it reads
                entry["dtype"] = dtype_name(dtypes[name])
    model.config.dtype = like.dtype


def _keep_dtypes(model: nn.Module, index: Mapping[str, dict[str, Any]]) -> None:
    """Have each weight in a file rounded to its own dtype. transformers below 5.13 names the model's for all.

    Args:
        index: accelerate's, of weights by their names.
    """
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in index and "safetensors_file" in index[name]:
            index[name]["dtype"] = dtype_name(parameter.dtype)
