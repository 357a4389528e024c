"""compute-sanitizer over the kernels' own tests: bad memory accesses, and races."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("memcheck", "racecheck")
PLACES = ("/usr/local/cuda/bin/compute-sanitizer", "/usr/local/cuda/compute-sanitizer/compute-sanitizer")
TESTS = "add_norm_has_the_bits or gradients_of_add_norm or too_long or any_company or no_rows"
LIMIT_S = 55.0
FOUND = 86  # the exit status for errors that the tool finds; the tests' own are 0 to 5


def sanitizer(results: dict[str, Any], device: torch.device, quick: bool) -> Iterator[str]:
    """Into ``results``: for each tool whether it came out clean; or that there is none."""
    program = shutil.which("compute-sanitizer") or next(filter(os.path.exists, PLACES), None)
    results |= {"tool": program, "rows": []}
    if program is None:
        results["why"] = "compute-sanitizer is not on this machine"
        return
    for tool in TOOLS:
        yield tool
        results["rows"].append({"check": tool} | checked(program, tool, device, "no_rows" if quick else TESTS))


def checked(program: str, tool: str, device: torch.device, tests: str) -> dict[str, Any]:
    """One run: clean, not clean, or not finished, with the last lines that it wrote."""
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "application-only",
               sys.executable, "-m", "pytest", "-n", "0", "-m", "", "-p", "no:cacheprovider", "tests/test_triton.py",
               "-k", f"({tests}) and {device.type}"]  # fmt: skip
    # Without the allocator's cache, every tensor is an allocation of its own, whose ends the tool can see.
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": str(ROOT)}
    start = time.perf_counter()
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"clean": None, "said": f"not finished in {LIMIT_S:.0f} s", "seconds": LIMIT_S}
    said = (done.stdout + done.stderr).strip().splitlines()[-6:]
    return {"clean": done.returncode == 0, "exit_status": done.returncode, "said": "\n".join(said),
            "seconds": time.perf_counter() - start}  # fmt: skip
