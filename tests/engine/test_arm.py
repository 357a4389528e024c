"""The decoding kernel on ARM: compiled for aarch64 and run by emulation, its logits are the portable level's."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import assert_within, rms
from torch import Tensor

SOURCE = Path(__file__).with_name("step_check.c")
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
FLAGS = ["-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math"]  # those of hatch_build.py
FORMS = {"float columns": 2e-6, "half columns": 1e-4, "float rows": 2e-6, "half rows": 1e-4, "int8": 1e-4}


def logits(compiler: str, program: Path, *emulator: str) -> Tensor:
    """Return what the program prints, (forms, 1400)."""
    subprocess.run([compiler, *FLAGS, "-static", str(SOURCE), "-o", str(program), "-lm"], check=True, timeout=100)
    done = subprocess.run([*emulator, str(program)], capture_output=True, text=True, check=True, timeout=100)
    return torch.tensor([float(line) for line in done.stdout.split()], dtype=torch.float64).view(len(FORMS), -1)


@pytest.mark.thorough
def test_a_step_on_arm_is_the_portable_levels(tmp_path: Path) -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("compares emulated ARM with x86, and this is no x86")
    if missing := [tool for tool in ("gcc", COMPILER, EMULATOR) if shutil.which(tool) is None]:
        pytest.skip(f"not installed: {', '.join(missing)} (Debian: gcc-aarch64-linux-gnu, qemu-user)")
    native, arm = logits("gcc", tmp_path / "native"), logits(COMPILER, tmp_path / "arm", EMULATOR)
    assert native.isfinite().all()
    for (form, bound), supplied, expected in zip(FORMS.items(), arm, native, strict=True):
        assert_within(rms(supplied - expected), bound * rms(expected), rms(expected), form)
        assert rms(expected) > 0.1, form
