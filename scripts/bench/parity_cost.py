"""What does a judgement cost? Seconds and peak memory of ``minigpt parity``, of this tree and of another, in turns.

python scripts/bench/parity_cost.py --against ../old --rounds 3 --json docs/results/parity-cost-cpu.json
python scripts/bench/parity_cost.py --cases large,xl --rounds 1 --json docs/results/parity-memory-cpu.json

The other tree is a checkout, e.g. of ``git worktree add ../old COMMIT``, with its kernel built. Each command runs in a
process of its own. Weights of the published shapes are random, made by ``random_gpt2`` in a temporary folder. Linux
only: peak memory is what the system counts for the process, mapped files included.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import typer

from minigpt.device import environment

sys.path.insert(0, str(Path(__file__).parents[1]))  # scripts/

from bench.random_gpt2 import main as write_random
from bench.results import JsonFile, show

SITES = [f"h.{i}.ln_{j}" for i in range(4) for j in (1, 2)] + ["ln_f"]
CELLS = [word for name in ("textbook", "rms", "dyt") for word in ("--norm", name)]
SIX = [word for name in ("textbook", "rms", "dyt", "std_eps", "derf", "fused") for word in ("--norm", name)]
CASES: dict[str, tuple[str, list[str]]] = {  # a preset, and the words of the command
    "demo-one": ("demo", ["--norm", "rms"]),
    "demo-27": ("demo", [*CELLS, *(word for site in SITES for word in ("--sites", site))]),
    "gpt2-one": ("gpt2", ["--norm", "rms"]),
    "gpt2-six": ("gpt2", SIX),
    "large": ("gpt2-large", ["--norm", "rms"]),
    "xl": ("gpt2-xl", ["--norm", "rms"]),
}


def measure(tree: Path, model: Path | str, words: list[str]) -> tuple[float, float]:
    """Return seconds and peak gigabytes of one command.

    Raises:
        RuntimeError: if it could not be judged.
    """
    command = [sys.executable, "-m", "minigpt", "parity", "--model", str(model), "--device", "cpu", *words]
    begun = time.perf_counter()
    # `python -m` looks in the working directory before PYTHONPATH
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    if (code := os.waitstatus_to_exitcode(status)) not in (0, 1):
        raise RuntimeError(f"{' '.join(command)} ended with status {code}")
    return time.perf_counter() - begun, usage.ru_maxrss / 2**20


def main(
    against: Path | None = None, cases: str = ",".join(CASES), rounds: int = 3, json_file: JsonFile = None
) -> None:
    """Measure the cases, e.g. "large,xl"."""
    trees = {"this": Path(__file__).parents[2]} | ({"against": against.resolve()} if against else {})
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        models: dict[str, Path | str] = {"demo": "demo"}
        for name in cases.split(","):
            preset, words = CASES[name]
            if preset not in models:
                models[preset] = Path(folder) / preset
                write_random(Path(folder) / preset, preset)
            runs: dict[str, list[tuple[float, float]]] = {tree: [] for tree in trees}
            for _ in range(rounds):
                for tree, place in trees.items():
                    runs[tree].append(measure(place, models[preset], words))
            results[name] = {
                tree: {
                    "seconds": [round(seconds, 2) for seconds, _ in measured],
                    "median_seconds": round(statistics.median(seconds for seconds, _ in measured), 2),
                    "peak_gb": round(max(peak for _, peak in measured), 2),
                }
                for tree, measured in runs.items()
            }
            print(name, results[name], file=sys.stderr, flush=True)
    show({"rounds": rounds, **environment(os.cpu_count() or 1), "cases": results}, json_file)


if __name__ == "__main__":
    typer.run(main)
