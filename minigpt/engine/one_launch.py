"""Attention of one new token a row over a cache of fixed shape, in one launch: the writing into the cache included.

The library takes two launches for that, or what a compiler makes of them four, and reads all the room of the cache.
This reads what is written of it. Triton is imported where it is first used, and not before.

B rows, H heads, S tokens that there is room for, D width of a head, C = H * D.
"""

# pyright: reportCallIssue=false
# A launch takes num_warps beside what the kernel itself does.

import importlib.util
import threading
import warnings
from typing import NamedTuple, TypeGuard

import torch
from jaxtyping import Float, Int
from torch import Tensor

from minigpt.engine.product import only_infers
from minigpt.model.cache import LayerCache
from minigpt.norms.triton import interpreting

OLDEST = 8  # generation of devices for which Triton has every dtype
HELD = 32 * 1024  # bytes of keys that a program holds, in the dtype that sums are kept in
WARPS = 8  # that share them

Layers = tuple[Tensor, ...]  # each (2, B, H, S, D); of one tensor for all layers, a compiler copies the whole for each

_deciding = threading.Lock()
_decided: dict[torch.device, bool] = {}  # of every device that was asked for, whether the kernel runs there


class FixedCache(NamedTuple):
    """All the room of a cache, with the new token's column as data. Masked columns are read: they must be finite."""

    layers: Layers
    column: Tensor  # (1,)

    def update(self, layer: int, new: Tensor) -> tuple[Tensor, ...]:
        """Write a layer's new keys and values (2, B, H, 1, D) into the column; return its room, each (B, H, S, D)."""
        return self.layers[layer].index_copy_(3, self.column, new).unbind()


def prepare(device: torch.device) -> None:
    """Find out, once for each device, whether the kernel runs there; ``suits`` is false before."""
    with _deciding:
        if device not in _decided:
            _decided[device] = has_compiler(device) and _compiles(device)


def has_compiler(device: torch.device) -> bool:
    """Whether Triton is there, and compiles for this device and all of our dtypes."""
    is_new = device.type == "cuda" and torch.cuda.get_device_properties(device).major >= OLDEST
    return is_new and importlib.util.find_spec("triton") is not None and not interpreting()


def _compiles(device: torch.device) -> bool:
    """Whether a launch succeeds; a warning says why not. What Triton needs may not be on the machine: a C compiler."""
    qkv, room, mask = (torch.zeros(shape, device=device) for shape in ((1, 1, 48), (2, 1, 1, 16, 16), (1, 1, 1, 16)))
    column = torch.zeros(1, dtype=torch.long, device=device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Triton's own, which may be errors to somebody
            attend(qkv, room, mask, column, 1.0)
    except Exception as error:  # somebody else's compiler, and those that it calls, may raise anything
        what = f"Triton cannot compile here ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        warnings.warn(f"{what}, so attention while decoding on {device} takes slower kernels", stacklevel=4)
        return False
    return True


def suits(cache: LayerCache | None, qkv: Float[Tensor, "batch seq qkv"]) -> TypeGuard[FixedCache]:
    """Whether ``attend`` may take these new tokens: for inference, on a device that is prepared."""
    if not isinstance(cache, FixedCache) or not _decided.get(qkv.device, False):
        return False
    return only_infers(qkv) and qkv.dtype == cache.layers[0].dtype


def attend(
    qkv: Float[Tensor, "batch 1 qkv"],
    room: Float[Tensor, "2 batch heads room head"],
    mask: Float[Tensor, "rows 1 1 room"],
    column: Int[Tensor, "1"],
    scale: float,
) -> Float[Tensor, "batch 1 embd"]:
    """softmax(scale * q K^T + mask) V of the columns up to the new one, whose keys and values are written first.

    Sums are kept in float32 or wider. A row comes out the same in any company. Nothing behind the new column is read.

    Args:
        qkv: (B, 1, 3C) queries, keys and values of the new tokens.
        room: (2, B, H, S, D) a layer's keys and values, each head's in one piece; the new ones are written into it.
        mask: (B or 1, 1, 1, S) what is added to the scores; nothing, to the new token's own.
        column: (1,) where the new token stands.
    """
    return torch.ops.minigpt.attend_newest(qkv, room, mask, column, scale)


def _attend(qkv: Tensor, room: Tensor, mask: Tensor, column: Tensor, scale: float) -> Tensor:
    import triton  # pyright: ignore[reportMissingImports]

    from minigpt.engine.one_launch_kernel import attend_newest

    _, batch, heads, _, width = room.shape
    wide = torch.promote_types(room.dtype, torch.float32)
    block = max(16, triton.next_power_of_2(width))
    y = _shape(qkv, room, mask, column, scale)
    with torch.cuda.device_of(qkv):  # a kernel starts on the current device and its current stream
        attend_newest[batch * heads,](
            qkv, room, mask, column, y, heads, *room.stride()[:3], mask.stride(0) if len(mask) > 1 else 0,
            SCALE=scale, WIDTH=width, BLOCK=block, PLACES=max(1, HELD // (block * wide.itemsize)), num_warps=WARPS,
        )  # fmt: skip
    return y


def _shape(qkv: Tensor, room: Tensor, mask: Tensor, column: Tensor, scale: float) -> Tensor:
    return qkv.new_empty(qkv.shape[0], 1, qkv.shape[2] // 3)  # of any number: ``len`` would make it one


torch.library.define(
    "minigpt::attend_newest",
    "(Tensor qkv, Tensor(a!) room, Tensor mask, Tensor column, float scale) -> Tensor",
    tags=torch.Tag.needs_exact_strides,
)
torch.library.impl("minigpt::attend_newest", ("cpu", "cuda"), _attend)
torch.library.register_fake("minigpt::attend_newest", _shape)
