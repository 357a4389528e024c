"""Parity, norms and decoding on the CUDA device that is there, in some minutes.

python scripts/gpu/suite.py --out docs/results

It ends with pass or fail for logits parity at four sizes. It writes gpu.json into the folder, again after every piece
of work, so that a run cut short keeps its results. Weights are random at the published shapes, with massive
activations. Nothing is downloaded, and a checkout of the project is enough.
``--device cpu --quick`` runs the same code on tiny models.
The exit status is 1 if parity does not hold or a part fails, and 2 if there is no device.
"""

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed

# Must be set before the first attention: cuDNN's makes a plan for every length, which is slow for texts that grow.
os.environ.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")

import torch
import typer
from bench.results import keep
from gpu.decode import decode
from gpu.norms import norms
from gpu.parity import failures, parity, verdicts
from gpu.tiles import tiles

from minigpt.device import resolve_device
from minigpt.errors import ConfigError
from minigpt.machine import software, versions

PARTS: dict[str, Callable[[dict[str, Any], torch.device, bool], Iterator[str]]] = {
    "parity": parity, "norms": norms, "decode": decode, "tiles": tiles,
}  # fmt: skip


def main(
    out: Annotated[Path, typer.Option(help="Folder for gpu.json.")] = Path("docs/results"),
    device: Annotated[str, typer.Option(help="cuda, cuda:N, or cpu to try the suite itself.")] = "cuda",
    quick: Annotated[bool, typer.Option("--quick", help="Tiny models and few shapes.")] = False,
    part: Annotated[list[str] | None, typer.Option(help="Only this part; may be repeated.")] = None,
) -> None:
    """Measure everything, or the parts."""
    try:
        place = resolve_device(device)
        chosen = {name: PARTS[name] for name in part or PARTS}
    except (ConfigError, KeyError) as error:
        message = f"unknown part {error}; known are {', '.join(PARTS)}" if isinstance(error, KeyError) else str(error)
        print(f"error: {message}", file=sys.stderr)
        raise typer.Exit(2) from error
    results: dict[str, Any] = {"environment": environment(place, quick), "parts": {}} | {name: {} for name in PARTS}
    out.mkdir(parents=True, exist_ok=True)
    for name, work in chosen.items():
        start = time.perf_counter()
        told = results["parts"][name] = {"seconds": 0.0, "error": None}
        try:
            for message in work(results[name], place, quick):
                print(f"{time.perf_counter() - start:6.1f} s  {name}: {message}", flush=True)
                keep(results, out / "gpu.json")
        except Exception as error:  # the other parts are still to be measured
            told["error"] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        told["seconds"] = time.perf_counter() - start
        keep(results, out / "gpu.json")
    for row in verdicts(results["parity"]):
        print(f"{row['logits parity']:10} {row['model']}: {row['that hold']} of {row['comparisons']} comparisons hold")
    raise typer.Exit(int(is_broken(results)))


def is_broken(results: dict[str, Any]) -> bool:
    """True if something is wrong, as opposed to slow."""
    return bool(failures(results["parity"])) or any(how["error"] for how in results["parts"].values())


def environment(device: torch.device, quick: bool) -> dict[str, Any]:
    """The machine and the versions of the measurement."""
    told = versions(device) | {"device": str(device), "quick": quick, **software("triton")}
    if device.type != "cuda":
        return told
    seen = torch.cuda.get_device_properties(device)
    return told | {
        "driver": _driver(), "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
        "cudnn_attention_last": os.environ["TORCH_CUDNN_SDPA_DEPRIORITIZED"],
        "compute_capability": f"{seen.major}.{seen.minor}", "multiprocessors": seen.multi_processor_count,
        "memory_gib": round(seen.total_memory / 2**30, 1),
    }  # fmt: skip


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


if __name__ == "__main__":
    typer.run(main)
