"""What the processor is, and what the libraries can do with it."""

import platform
from pathlib import Path

import torch

INFO = Path("/proc/cpuinfo")


def processor_fact(name: str) -> str | None:
    """What the system says of the processor by that name, such as "model name"; None where it says nothing."""
    lines = INFO.read_text().splitlines() if INFO.exists() else []
    facts = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in facts if key.strip() == name), None)


def processor_name() -> str:
    """The processor's own name where the system tells it, else the name of its kind."""
    return processor_fact("model name") or platform.machine()


HAS_ONEDNN = torch.backends.mkldnn.is_available()
# MKL keeps its best kernels to Intel's own processors; oneDNN has them for AMD's too.
PREFERS_ONEDNN = HAS_ONEDNN and "AuthenticAMD" in (processor_fact("vendor_id") or platform.processor())
HAS_TILES = torch.cpu._is_amx_tile_supported()  # instructions that multiply many rows at once
HAS_BFLOAT16 = torch.cpu._is_avx512_bf16_supported() or HAS_TILES  # instructions for it
