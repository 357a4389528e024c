"""Measure the norms of other packages, each group in an environment of its own with pinned versions.

    python scripts/elsewhere/norms.py docs/results/elsewhere-norms.json jax_norms native_norms

A group is a file beside this one: its norms as functions of arrays, or as classes. The rows of the groups that are
named are measured again, or of all; the others stay. PyTorch and minigpt are those of the active environment.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from minigpt.files import write_atomically
from minigpt.machine import processor_name

HERE = Path(__file__).parent
GROUPS = {  # what to install beside the active environment
    "jax_norms": (
        "jax==0.10.2", "flax==0.12.8", "equinox==0.13.8", "dm-haiku==0.0.17", "penzai==0.2.5", "keras==3.15.1",
    ),
    "native_norms": (
        "mlx[cpu]==0.32.4", "tinygrad==0.14.0", "ziglang==0.17.1", "paddlepaddle==3.3.1", "onnx==1.23.2",
        "onnxruntime==1.32.0", "openvino==2026.4.1",
    ),
    "torch_norms": ("x-transformers==2.31.10",),
}  # fmt: skip
ALONE = {"torch_norms": ("timm==1.0.31", "torchtune==0.6.1")}  # without what they require: see torch_norms.py


def environment(place: Path, group: str) -> Path:
    """Make an environment that sees the packages of the active one; return its interpreter."""
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    outer = place / "lib" / version / "site-packages" / "outer.pth"
    outer.write_text(sysconfig.get_path("purelib") + "\n")
    constraint = place / "constraint.txt"
    constraint.write_text(f"torch=={torch.__version__.partition('+')[0]}\n")
    install = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(constraint)]
    subprocess.run([*install, *GROUPS[group]], check=True)
    for package in ALONE.get(group, ()):
        subprocess.run([*install, "--no-deps", package], check=True)
    return python


def measured(python: Path, group: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each norm of a group, measured in an environment."""
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
    command = [str(python), str(HERE / "measure_norms.py"), group]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=True
    )
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            yield {"group": group, **json.loads(line)}


def write(out: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows beside those of other groups, in the order of ``GROUPS``."""
    known = json.loads(out.read_text(encoding="utf-8"))["rows"] if out.exists() else []
    new = {row["group"] for row in rows}
    every = [row for row in known if row["group"] not in new] + rows
    order = list(GROUPS)
    every.sort(key=lambda row: order.index(row["group"]))
    about = {"torch": torch.__version__, "processor": processor_name(), "rows": every}
    write_atomically(out, json.dumps(about, indent=1) + "\n")


def main(out: Path, groups: list[str]) -> None:
    """Measure the groups, all by default, and write each when it is done."""
    for group in groups or list(GROUPS):
        with tempfile.TemporaryDirectory() as place:
            python = environment(Path(place), group)
            write(out, list(measured(python, group)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
