"""The compiled functions of ``kernel.c``: loading them, and products with weights in int8.

R rows of inputs, K inputs of a product.
"""

import ctypes
import os
import warnings
import zlib
from ctypes import byref, c_long, c_void_p
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from minigpt.engine.structs import COLUMN_FORMS, INT8_FORM, ROW_FORMS, ROWS_AT_ONCE, SLAB, CMatrix
from minigpt.machine import IS_AMD

SOURCES = ("simd.h", "model.h", "products.h", "kernel.c")  # of the library, as in hatch_build.py
LEVELS = ("bf16", "vnni", "avx512", "avxvnni", "avx2", "dotprod", "portable")  # of instructions, the best first
SIGNATURES = {  # of the functions of ``kernel.c``: what they return, and their arguments
    "memory": (c_long, c_void_p, c_void_p, c_long, c_long),
    "step": (None, c_void_p, c_void_p, c_long, c_long, c_void_p),
    "product_memory": (c_long, c_void_p, c_long, c_long),
    "product": (None, c_void_p, c_void_p, c_void_p, c_long, c_long, c_void_p),
    "round": (None, c_void_p, c_void_p, c_long),
}
ALIGNMENT = 64  # bytes, of the memory that the kernel works in

_CHOSEN = os.environ.get("MINIGPT_KERNEL", "")  # "0" turns the kernel off; a level is taken instead of the best
_is_on = _CHOSEN != "0"


@cache
def load() -> SimpleNamespace | str:
    """Return the functions at the best level of the processor, and its name; or why there are none.

    MINIGPT_KERNEL may name a level.
    """
    path = Path(os.environ.get("MINIGPT_KERNEL_LIBRARY", Path(__file__).with_name("libminigpt.so")))
    if not path.is_file():
        return "the kernel was not built; installing minigpt where there is a C compiler builds it"
    for runtime in (Path(torch.__file__).parent / "lib").glob("libgomp*"):
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)  # PyTorch's own threads, not a second pool
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"the kernel cannot be loaded: {error}"
    if _is_of_other_sources(library, path):
        reason = f"{path} was built from other sources than the ones in its folder"
        again = "install minigpt again, or run python hatch_build.py in its repository"
        warnings.warn(f"{reason}, so decoding takes PyTorch; {again}", stacklevel=2)
        return reason
    levels = _levels_of(library)
    level = _CHOSEN
    if _CHOSEN in ("", "0", "1"):
        level = _best_of(levels)
    if level not in levels:
        return f"MINIGPT_KERNEL={level} is none of this processor's levels: {', '.join(levels)}"
    return _functions_of(library, level, levels)


def _levels_of(library: ctypes.CDLL) -> list[str]:
    """Return the levels that the library has and the processor supports, the best first."""
    library.minigpt_supports.argtypes = [ctypes.c_char_p]
    levels: list[str] = []
    for level in LEVELS:
        is_built = hasattr(library, f"minigpt_step_{level}")
        if is_built and library.minigpt_supports(level.encode()):
            levels.append(level)
    return levels


def _best_of(levels: list[str]) -> str:
    best = levels[0]
    if best == "bf16" and not IS_AMD:  # Intel's multiply no faster, and weights must be packed in pairs
        best = levels[1]
    return best


def _functions_of(library: ctypes.CDLL, level: str, levels: list[str]) -> SimpleNamespace:
    kernel = SimpleNamespace(level=level, levels=levels)
    for name, (result, *arguments) in SIGNATURES.items():
        function = getattr(library, f"minigpt_{name}_{level}")
        function.restype = result
        function.argtypes = arguments
        setattr(kernel, name, function)
    return kernel


def _is_of_other_sources(library: ctypes.CDLL, path: Path) -> bool:
    contents = b""
    for name in SOURCES:
        source = path.with_name(name)
        if not source.is_file():
            return False
        contents += source.read_bytes()
    if not hasattr(library, "minigpt_sources"):
        return True
    built_from = ctypes.c_uint32(library.minigpt_sources()).value
    return built_from != zlib.crc32(contents)


def functions() -> SimpleNamespace:
    """Return the functions of the kernel, which ``is_at_hand``."""
    kernel = load()
    assert not isinstance(kernel, str)
    return kernel


def use_kernel(on: bool) -> None:
    """Turn the decoding kernel on or off for this process. The environment variable MINIGPT_KERNEL=0 does the same."""
    global _is_on
    _is_on = on


def is_on() -> bool:
    """Return False if the kernel is turned off."""
    return _is_on


def is_at_hand() -> bool:
    """Return True if the kernel can be loaded and is not turned off."""
    return _is_on and not isinstance(load(), str)


def int8_product(
    x: Float[Tensor, "rows inp"], panels: UInt8[Tensor, "panels blocks bytes"], out: int
) -> Float[Tensor, "rows out"]:
    """Return ``x W^T`` by the kernel; ``panels`` as ``int8.panels_of`` makes them."""
    kernel, threads = functions(), torch.get_num_threads()
    x = x.contiguous()
    y = x.new_empty(len(x), padded_outputs(out))
    matrix = CMatrix(panels.data_ptr(), None, x.shape[1], out, INT8_FORM)
    rows_at_once = min(len(x), ROWS_AT_ONCE)
    memory = aligned_memory(kernel.product_memory(byref(matrix), rows_at_once, threads))
    for rows, results in zip(x.split(ROWS_AT_ONCE), y.split(ROWS_AT_ONCE), strict=True):
        kernel.product(byref(matrix), rows.data_ptr(), results.data_ptr(), len(rows), threads, memory.data_ptr())
    return y[:, :out]


def int8_panels(rows: Float[Tensor, "out inp"], panels: UInt8[Tensor, "panels blocks bytes"]) -> None:
    """Round a weight in float32 or bfloat16 to ``panels``, as ``int8.panels_of`` does."""
    if rows.t().is_contiguous() and not rows.is_contiguous():
        weight, forms = rows, COLUMN_FORMS
    else:
        weight, forms = rows.contiguous(), ROW_FORMS
    matrix = CMatrix(weight.data_ptr(), None, rows.shape[1], len(rows), forms[rows.dtype])
    functions().round(byref(matrix), panels.data_ptr(), torch.get_num_threads())


def padded_outputs(outputs: int) -> int:
    """Return the columns that the kernel writes for so many outputs."""
    return -(-outputs // SLAB) * SLAB


def aligned_memory(size: int) -> UInt8[Tensor, " size"]:
    """Return so many bytes of memory, which begin at a multiple of ``ALIGNMENT``."""
    memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device="cpu")
    start = -memory.data_ptr() % ALIGNMENT
    return memory[start : start + size]
