"""Compile the decoding kernel, ``minigpt/engine/kernel.c``, when a wheel is built or installed.

Without a compiler only speed is lost. The file is compiled once for each level of instructions, and the best level of
the processor is chosen at run time.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent
SOURCE, LIBRARY = ROOT / "minigpt/engine/kernel.c", ROOT / "minigpt/engine/libminigpt.so"
SOURCES = ("simd.h", "model.h", "products.h", "kernel.c")  # each uses those before it
FLAGS = ["-std=gnu11", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math"]
X86 = {
    "portable": [],
    "avx2": ["-march=x86-64-v3"],
    "avxvnni": ["-march=x86-64-v3", "-mavxvnni"],
    "avx512": ["-march=x86-64-v4"],
    "vnni": ["-march=x86-64-v4", "-mavx512vnni"],
    "bf16": ["-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"],
}
ARM = {"portable": [], "dotprod": ["-march=armv8.2-a+dotprod"]}
LEVELS = {"x86_64": X86, "amd64": X86, "aarch64": ARM, "arm64": ARM}  # by the machine's name


class KernelBuildHook(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        del version
        try:
            build(LIBRARY)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"minigpt decodes with PyTorch alone: the kernel was not compiled ({error})", file=sys.stderr)
            return
        build_data["artifacts"].append("minigpt/engine/libminigpt.so")
        build_data["pure_python"] = False
        # Any Python can load it. For PyPI, auditwheel says which Linux systems can, too.
        system = "macosx_11_0" if sys.platform == "darwin" else sys.platform
        build_data["tag"] = f"py3-none-{system}_{platform.machine().lower()}"


def build(library: Path, extra: tuple[str, ...] = ()) -> None:
    """Compile the kernel into ``library``.

    Raises:
        OSError: if there is no C compiler.
        subprocess.CalledProcessError: if it fails.
    """
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise FileNotFoundError("no C compiler")
    environment = {"MACOSX_DEPLOYMENT_TARGET": "11.0", **os.environ}  # as the wheel's tag says
    levels = LEVELS.get(platform.machine().lower(), {"portable": []})
    # Apple's clang has no OpenMP: the kernel starts threads itself.
    threads = ["-fopenmp"] if sys.platform == "linux" else ["-fopenmp-simd", "-pthread"]
    sources = zlib.crc32(b"".join(SOURCE.with_name(name).read_bytes() for name in SOURCES))
    with tempfile.TemporaryDirectory() as folder:
        objects = []
        for level, flags in levels.items():
            objects.append(f"{folder}/{level}.o")
            dispatch = ["-DDISPATCH", f"-DSOURCES={sources}u"] if level == "portable" else []
            command = [compiler, *FLAGS, *threads, *flags, *extra, *dispatch, f"-DLEVEL={level}"]
            done = subprocess.run(
                [*command, "-c", str(SOURCE), "-o", objects[-1]], check=level == "portable", env=environment
            )
            if done.returncode:  # an older compiler, which does not know these instructions
                objects.pop()
        # Linked without OpenMP's runtime: the one that PyTorch has loaded is used.
        undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
        link = [compiler, "-shared", *undefined, *extra, *objects, "-o", str(library), "-lm"]
        subprocess.run(link, check=True, env=environment)


if __name__ == "__main__":
    build(LIBRARY)
