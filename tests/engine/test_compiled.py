"""The decoding kernel compiled otherwise than on this machine: without OpenMP, and for ARM, run by emulation."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import assert_same_bits, assert_within, rms
from torch import Tensor

SOURCE = Path(__file__).with_name("step_check.c")
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
FLAGS = ["-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math"]  # those of hatch_build.py, without OpenMP
FORMS = {"float columns": 2e-6, "half columns": 1e-4, "float rows": 2e-6, "half rows": 1e-4, "int8": 1e-4}


def build(program: Path, compiler: str = "gcc", *flags: str) -> Path:
    subprocess.run(
        [compiler, *FLAGS, *flags, str(SOURCE), "-o", str(program), "-lm", "-pthread"], check=True, timeout=100
    )
    return program


def logits(*command: str | Path) -> Tensor:
    """Return what the program prints, (forms, 1400)."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.tensor([float(line) for line in done.stdout.split()], dtype=torch.float64).view(len(FORMS), -1)


def require(*tools: str) -> None:
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        pytest.skip(f"not installed: {', '.join(missing)} (Debian: gcc, gcc-aarch64-linux-gnu, qemu-user)")


@pytest.mark.thorough
def test_threads_without_openmp_give_the_same_bits_and_do_not_race(tmp_path: Path) -> None:
    require("gcc")
    plain, checked = build(tmp_path / "plain"), build(tmp_path / "checked", "gcc", "-fsanitize=thread", "-g")
    alone = logits(plain, "1")
    assert alone.isfinite().all()
    for threads in ("2", "5"):
        assert_same_bits(logits(plain, threads), alone, f"{threads} threads")
        assert_same_bits(logits("setarch", "-R", checked, threads), alone, f"{threads} threads, watched")


@pytest.mark.thorough
def test_a_step_on_arm_is_the_portable_levels(tmp_path: Path) -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("compares emulated ARM with x86, and this machine is not x86")
    require("gcc", COMPILER, EMULATOR)
    native = logits(build(tmp_path / "native"))
    arm = logits(EMULATOR, build(tmp_path / "arm", COMPILER, "-static"), "2")
    for (form, bound), supplied, expected in zip(FORMS.items(), arm, native, strict=True):
        assert_within(rms(supplied - expected), bound * rms(expected), rms(expected), form)
        assert rms(expected) > 0.1, form
    dotprod = build(tmp_path / "dotprod", COMPILER, "-static", "-march=armv8.2-a+dotprod")
    assert_same_bits(logits(EMULATOR, dotprod, "2"), arm, "dot products")
