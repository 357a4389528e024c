"""What the processor is, and what the libraries can do with it."""

import platform
from pathlib import Path

import torch

INFO = Path("/proc/cpuinfo")


def processor_fact(name: str) -> str | None:
    """Return a field of /proc/cpuinfo, e.g. "model name"; None if there is none."""
    lines = INFO.read_text().splitlines() if INFO.exists() else []
    facts = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in facts if key.strip() == name), None)


def processor_name() -> str:
    """The processor's own name where the system tells it, else the name of its kind."""
    return processor_fact("model name") or platform.machine()


HAS_ONEDNN = torch.backends.mkldnn.is_available()
# MKL keeps its best kernels to Intel's own processors. oneDNN has them for AMD's, from AVX-512 on.
_IS_AMD = "AuthenticAMD" in (processor_fact("vendor_id") or platform.processor())
PREFERS_ONEDNN = HAS_ONEDNN and _IS_AMD and torch.cpu._is_avx512_supported()
HAS_BFLOAT16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()  # instructions for it

HALVES = (torch.bfloat16, torch.float16)
_KNOWN = {  # to oneDNN: bfloat16 with AVX-512 at least, or an equal of it
    torch.bfloat16: HAS_ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    torch.float16: HAS_ONEDNN and torch.ops.mkldnn._is_mkldnn_fp16_supported(),
}
_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
# But for a few rows and a weight that lies by rows, the library takes many times float32's time for these.
SLOW_HALVES = tuple(dtype for dtype in HALVES if _IS_X86 and not _KNOWN[dtype])
