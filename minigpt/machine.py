"""The machine: what its processor can do, how the process uses memory and threads, and versions for a report."""

import contextlib
import ctypes
import os
import platform
import re
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from minigpt.precision import HALVES
from minigpt.version import __version__

_INFO = Path("/proc/cpuinfo")  # of Linux: "model name      : AMD EPYC ..." of each processor
_CPU: dict[str, str] = {}
if _INFO.exists():
    _CPU.update(re.findall(r"(.+?)\s*: (.+)", _INFO.read_text()))

HAS_ONEDNN = torch.backends.mkldnn.is_available()
# MKL keeps its best kernels to Intel's own processors. oneDNN has them for AMD's, from AVX-512 on.
IS_AMD = "AuthenticAMD" in _CPU.get("vendor_id", platform.processor())
PREFERS_ONEDNN = HAS_ONEDNN and IS_AMD and torch.cpu._is_avx512_supported()
HAS_BFLOAT16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()  # instructions for it

_KNOWN = {  # to oneDNN: bfloat16 with AVX-512 at least, or an equal of it
    torch.bfloat16: HAS_ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    torch.float16: HAS_ONEDNN and torch.ops.mkldnn._is_mkldnn_fp16_supported(),
}
_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
# Without native instructions oneDNN is many times slower in these dtypes than in float32, except for few rows and a
# row-major weight.
SLOW_HALVES = tuple(dtype for dtype in HALVES if _IS_X86 and not _KNOWN[dtype])

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt: the allocator keeps what is smaller
_largest_piece = 2**25  # bytes of freed memory that are kept in one piece: what glibc's own limit grows to
ENVIRONMENT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "32", "THP_MEM_ALLOC_ENABLE": "1"}


def processor_name() -> str:
    """Return the name of the processor where the system gives it, else the name of its kind."""
    return _CPU.get("model name", platform.machine())


def settle_memory() -> None:
    """Keep freed memory, use large pages for tensors, and limit the programs that oneDNN keeps.

    On Linux with glibc, freed memory stays with the process. Otherwise the next layer asks the system for the same
    pages again, which takes a tenth of the time of a long prompt. PyTorch's large tensors get pages of 2 MiB, which
    were read up to 1.7 times as fast as pages of 4 KiB. oneDNN keeps its compiled programs for 32 shapes, and not for
    every length of a prompt. Variables that the environment already has keep their values. Call it before the first
    tensor.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    _keep_pieces_to(2**30)


def return_memory() -> None:
    """Give the memory of a tensor above 2 MiB back to the system when it is freed, where weights come and go in turns.

    What is kept in larger pieces is hardly used again: weights and outputs have many sizes, and the process grows.
    """
    _keep_pieces_to(2**21)


@contextlib.contextmanager
def kept_memory() -> Iterator[None]:
    """Keep freed memory in the block, where large tensors of one size come and go. Afterwards as before."""
    before = _largest_piece
    _keep_pieces_to(2**30)
    try:
        yield
    finally:
        _keep_pieces_to(before)


def _keep_pieces_to(size: int) -> None:
    """Keep freed memory in pieces of at most so many bytes, and return what is kept beyond that."""
    global _largest_piece
    _largest_piece = size
    with contextlib.suppress(TypeError, AttributeError, OSError):  # another system, another library
        libc = ctypes.CDLL(None)
        for threshold in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            libc.mallopt(threshold, size)
        libc.malloc_trim(0)


def software(*packages: str) -> dict[str, Any]:
    """Return the versions of Python, minigpt, torch and these packages; None for one that is not installed."""
    versions = {"python": platform.python_version(), "minigpt": __version__, "torch": torch.__version__}
    for name in packages:
        versions[name] = version(name) if find_spec(name) else None
    return versions


def versions(device: torch.device) -> dict[str, Any]:
    """Return the versions, the hardware and the threads of a verdict."""
    hardware = processor_name()
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    return software("transformers") | {"hardware": hardware, "threads": torch.get_num_threads()}


@contextlib.contextmanager
def on_threads(count: int | None) -> Iterator[None]:
    """Let PyTorch compute on ``count`` threads; None for as many as it has."""
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch compute on one thread. As a decorator: the function does.

    After each operation PyTorch's other threads spin for milliseconds, which is most of the processor time of many
    small operations.
    """
    with on_threads(1):
        yield
