"""What a figure was measured on."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from minigpt.model.product import HAS_BFLOAT16

PACKAGES = ("transformers", "ctranslate2")


def environment(threads: int, *packages: str) -> dict[str, Any]:
    """Processor, its instructions as far as they matter here, threads, and how busy the machine is; and the versions of
    Python and the packages: ours, those that are always of interest, and those named here."""
    return {
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "bfloat16_instructions": HAS_BFLOAT16,
        "vnni": torch.cpu._is_vnni_supported(),
        "threads": threads,
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    } | software(*PACKAGES, *packages)


def software(*packages: str) -> dict[str, Any]:
    """The versions of ours, of Python, of torch and of these packages; None for one that is not installed."""
    import minigpt

    own = {"python": platform.python_version(), "minigpt": minigpt.__version__, "torch": torch.__version__}
    return own | {name: installed(name) for name in packages}


def processor() -> str:
    """The processor's own name where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def installed(package: str) -> str | None:
    """The version of a package; None where it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
