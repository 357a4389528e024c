"""What a figure was measured on."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from minigpt.processor import HAS_BFLOAT16, processor_name

PACKAGES = ("transformers", "ctranslate2")


def environment(threads: int, *packages: str) -> dict[str, Any]:
    """Processor, its instructions as far as they matter here, threads, and how busy the machine is; and the versions of
    Python and the packages: ours, those that are always of interest, and those named here."""
    return {
        "processor": processor_name(),
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


def versions(device: torch.device) -> dict[str, Any]:
    """What a judgement was made with, and on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    return software("transformers") | {"hardware": name, "threads": torch.get_num_threads()}


def installed(package: str) -> str | None:
    """The version of a package; None where it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
