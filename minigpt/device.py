"""The machine: where a model lives, in which precision, what processors can do, the process, its time and progress."""

import contextlib
import ctypes
import os
import platform
import re
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from minigpt.choices import DTYPE_NAMES, check_option
from minigpt.errors import ConfigError
from minigpt.version import __version__

_backends: Any = torch.backends
_PRODUCTS = (_backends.cuda.matmul, _backends.mkldnn.matmul)
_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]

Progress = Callable[[str, float], None]  # the name of a step, and the share of steps done before it, in [0, 1)

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}


def resolve_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return the torch dtype of a name; None, "the checkpoint's own", stays None.

    Raises:
        ConfigError: if the dtype is not one of float32, bfloat16, float16 and float64.
    """
    if dtype is not None and dtype not in DTYPES.values():
        check_option("dtype", dtype, DTYPE_NAMES)
    return DTYPES[dtype] if isinstance(dtype, str) else dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def resolve_device(device: str | int | torch.device | None) -> torch.device:
    """Return the device of a name; None is CUDA where there is one, else the CPU.

    Raises:
        ConfigError: if the name is unknown, or that device is not on this machine.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"unknown device {device!r}; known are cpu, cuda, cuda:N, mps and meta") from error
    if resolved.type in ("cpu", "meta"):
        return resolved
    backend: Any = getattr(torch, resolved.type, None)
    count = backend.device_count() if backend is not None and backend.is_available() else 0
    if (resolved.index or 0) >= count:
        raise ConfigError(
            f"device {str(device)!r} is not on this machine, where PyTorch sees {count}; use --device cpu"
        )
    return resolved


def require_values(device: torch.device) -> None:
    """Refuse to compute where there is nothing to compute with.

    Raises:
        ConfigError: if the device is meta, which holds shapes and no values.
    """
    if device.type == "meta":
        raise ConfigError("device 'meta' holds shapes and no values, so nothing can be computed there; use cpu or cuda")


def has_values(tensor: torch.Tensor) -> bool:
    """Return True if a program may read the tensor's values and branch on them.

    False on the meta device, under a compiler or ``torch.func.vmap``, and while ``torch.jit.trace`` or a CUDA graph
    records the program to repeat it with other values.
    """
    if torch.compiler.is_compiling() or tensor.is_meta or isinstance(tensor, FakeTensor | FunctionalTensor):
        return False
    if torch._C._get_tracing_state() or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    while _functorch.is_functorch_wrapped_tensor(tensor):  # by vmap, grad and their like, the last on the outside
        if _functorch.is_batchedtensor(tensor):
            return False
        tensor = _functorch.get_unwrapped(tensor)
    return True


def processor_name() -> str:
    """Return the name of the processor where the system tells it, else the name of its kind."""
    return _CPU.get("model name", platform.machine())


_INFO = Path("/proc/cpuinfo")  # of Linux: "model name      : AMD EPYC ..." of each processor
_CPU: dict[str, str] = dict(re.findall(r"(.+?)\s*: (.+)", _INFO.read_text())) if _INFO.exists() else {}


HAS_ONEDNN = torch.backends.mkldnn.is_available()
# MKL keeps its best kernels to Intel's own processors. oneDNN has them for AMD's, from AVX-512 on.
IS_AMD = "AuthenticAMD" in _CPU.get("vendor_id", platform.processor())
PREFERS_ONEDNN = HAS_ONEDNN and IS_AMD and torch.cpu._is_avx512_supported()
HAS_BFLOAT16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()  # instructions for it

HALVES = (torch.bfloat16, torch.float16)
_KNOWN = {  # to oneDNN: bfloat16 with AVX-512 at least, or an equal of it
    torch.bfloat16: HAS_ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    torch.float16: HAS_ONEDNN and torch.ops.mkldnn._is_mkldnn_fp16_supported(),
}
_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
# But for a few rows and a weight that lies by rows, the library takes many times float32's time for these.
SLOW_HALVES = tuple(dtype for dtype in HALVES if _IS_X86 and not _KNOWN[dtype])

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt: the largest piece that it does not give back at once
ENVIRONMENT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "32", "THP_MEM_ALLOC_ENABLE": "1"}


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
    with contextlib.suppress(TypeError, AttributeError, OSError):  # another system, another library
        mallopt = ctypes.CDLL(None).mallopt
        for threshold in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            mallopt(threshold, 2**30)


def software(*packages: str) -> dict[str, Any]:
    """Return the versions of Python, minigpt, torch and these packages; None for one that is not installed."""
    common = {"python": platform.python_version(), "minigpt": __version__, "torch": torch.__version__}
    return common | {name: version(name) if find_spec(name) else None for name in packages}


def versions(device: torch.device) -> dict[str, Any]:
    """Return the versions, the hardware and the threads of a verdict."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    return software("transformers") | {"hardware": name, "threads": torch.get_num_threads()}


def product_precision() -> tuple[str | None, ...]:
    """Return how precise float32 products are: PyTorch's old setting, and its new ones on a GPU and a CPU.

    The old one is None while it differs from the new ones, since it cannot be read then.
    """
    older = None
    with contextlib.suppress(RuntimeError):
        older = torch.get_float32_matmul_precision()
    return older, *(backend.fp32_precision for backend in _PRODUCTS)


def set_product_precision(precisions: tuple[str | None, ...]) -> None:
    """Restore what ``product_precision`` returned."""
    older, *newer = precisions
    torch.set_float32_matmul_precision(older or ("high" if newer[0] == "tf32" else "highest"))
    for backend, precision in zip(_PRODUCTS, newer, strict=True):
        backend.fp32_precision = precision


@contextlib.contextmanager
def full_products() -> Iterator[None]:
    """Compute float32 products in full: no TF32 on a GPU, no bfloat16 on a CPU, no autocast on either."""
    before = product_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        set_product_precision(before)


def finish(device: torch.device) -> None:
    """Wait until a device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Steps:
    """A counter of steps.

    Args:
        progress: called at the beginning of each step, unless it is None.
        total: the number of steps, if it is known.
    """

    def __init__(self, progress: Progress | None, total: int = 0) -> None:
        self.progress, self.total, self.begun = progress, total, 0

    def __call__(self, step: str) -> None:
        """Begin a step."""
        if self.progress is not None:
            self.progress(step, self.begun / max(self.total, self.begun + 1))
        self.begun += 1
