"""compute-sanitizer over the kernels' own tests: bad memory accesses, and races."""

import os
import shutil
import signal
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
FILE = "tests/norms/test_triton.py"
TESTS = "add_norm_has_the_bits or gradients_of_add_norm or too_long or any_company or no_rows"
LIMIT_S = float(os.environ.get("SANITIZER_SECONDS", "55"))  # for each; kernels that are not compiled yet take more
FOUND = 86  # the exit status for errors that the tool finds
RAN = (0, *range(1, 6), FOUND)  # those that pytest and the tool give where they could begin
REFUSALS = ("Device not supported", "error 999")  # the tool's, of a machine that it cannot look into


def sanitizer(results: dict[str, Any], device: torch.device, quick: bool) -> Iterator[str]:
    """Into ``results``: for each tool whether it came out clean; or that there is none."""
    program = shutil.which("compute-sanitizer") or next(filter(os.path.exists, PLACES), None)
    results |= {"tool": program, "rows": []}
    if program is None:
        results["why"] = "compute-sanitizer is not on this machine"
        return
    yield "compiling"
    ended(tests_of(device, "no_rows" if quick else TESTS))  # which would take the tools' time
    for tool in TOOLS:
        yield tool
        results["rows"].append({"check": tool} | checked(program, tool, device, "no_rows" if quick else TESTS))


def checked(program: str, tool: str, device: torch.device, tests: str) -> dict[str, Any]:
    """One run: clean; not clean, which failing tests are too; or neither, where the tool did not finish or begin."""
    # Calls that fail are not findings: libraries use them to find out what a device can do.
    how = ["--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "application-only"]
    how += ["--report-api-errors", "no"] * (tool == "memcheck")
    start = time.perf_counter()
    status, said = ended([program, *how, *tests_of(device, tests)])
    if status is None:
        return {"clean": None, "said": f"not finished in {LIMIT_S:.0f} s", "seconds": LIMIT_S}
    could_look = status in RAN and not any(refusal in said for refusal in REFUSALS)
    clean = status == 0 if could_look else None
    lines = said.strip().splitlines()[-6:]
    return {"clean": clean, "exit_status": status, "said": "\n".join(lines), "seconds": time.perf_counter() - start}


def tests_of(device: torch.device, tests: str) -> list[str]:
    """The command that runs them on the device."""
    return [sys.executable, "-m", "pytest", "-n", "0", "-m", "", "-p", "no:cacheprovider",
            FILE, "-k", f"({tests}) and {device.type}"]  # fmt: skip


def ended(command: list[str]) -> tuple[int | None, str]:
    """Exit status and all that was written; no status where it had to be ended, with every process that it began."""
    # Without the allocator's cache, every tensor is a separate allocation, whose ends the tool can see.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": path}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, **pipes) as running:
        try:
            said, _ = running.communicate(timeout=LIMIT_S)
        except BaseException as ending:
            os.killpg(running.pid, signal.SIGKILL)
            if isinstance(ending, subprocess.TimeoutExpired):
                return None, ""
            raise
    return running.returncode, said
