"""The machine and the versions that a figure was measured on."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from minigpt.device import HAS_BFLOAT16, processor_name


def environment(threads: int, *packages: str) -> dict[str, Any]:
    """Return the processor, its instructions, the threads and the load, and the versions of Python and packages."""
    return {
        "processor": processor_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "bfloat16_instructions": HAS_BFLOAT16,
        "vnni": torch.cpu._is_vnni_supported(),
        "threads": threads,
        "load_average": round(os.getloadavg()[0], 2),
        **software("transformers", "ctranslate2", *packages),
    }


def software(*packages: str) -> dict[str, Any]:
    """Return the versions of Python, minigpt, torch and these packages; None for one that is not installed."""
    import minigpt

    own = {"python": platform.python_version(), "minigpt": minigpt.__version__, "torch": torch.__version__}
    return own | {name: installed(name) for name in packages}


def versions(device: torch.device) -> dict[str, Any]:
    """Return the versions, the hardware and the threads of a verdict."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    return software("transformers") | {"hardware": name, "threads": torch.get_num_threads()}


def installed(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
