"""What does loading a large checkpoint cost? Seconds, and peak memory over a process that only imports torch.

python scripts/bench/load.py --preset gpt2-xl --json docs/results/load-xl-cpu.json

The checkpoint has random weights of the preset's shape, and every load runs in a separate process. The peak is the
system's own (VmHWM in /proc, so Linux only). It counts the pages of the mapped file that the process has in memory, not
those that only the system caches. On a busy machine cpu_s, the processor's time, is steadier than load_s.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import typer

import minigpt
from minigpt.measure.environment import environment

sys.path.insert(0, str(Path(__file__).parents[1]))  # scripts/

from bench.results import JsonFile, show

LOADS = {
    "float32": "device='cpu'",
    "bfloat16": "device='cpu', dtype='bfloat16'",
    "float16": "device='cpu', dtype='float16'",
    "meta": "device='meta'",
}

MAKE = """
import sys, minigpt
model = minigpt.GPT2(minigpt.GPT2Config.preset(sys.argv[2]))
minigpt.save_pretrained(model, sys.argv[1], max_shard_bytes=10**10)
"""

PROGRAM = """
import json, sys, time
import torch, minigpt
from minigpt import from_pretrained
from minigpt.bench.worker import peak_mb

bare, started, worked = peak_mb(), time.perf_counter(), time.process_time()
model = from_pretrained(sys.argv[1], HOW)
seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - worked
cost = dict(load_s=round(seconds, 3), cpu_s=round(cpu_seconds, 3), peak_mb_over_imports=round(peak_mb() - bare, 1))
print(json.dumps(cost))
"""


def main(preset: str = "gpt2-xl", json_file: JsonFile = None, folder: Path | None = None) -> None:
    """Print, and with --json write, what each way of loading cost."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        _run(MAKE, place, preset)
        results: dict[str, Any] = {
            "preset": preset,
            "parameters": minigpt.GPT2Config.preset(preset).parameter_count,
            "file_mb": round((Path(place) / "model.safetensors").stat().st_size / 2**20, 1),
            "loads": {name: json.loads(_run(PROGRAM.replace("HOW", how), place)) for name, how in LOADS.items()},
            "measured_on": environment(torch.get_num_threads()),
        }
    show(results, json_file)


def _run(program: str, *words: str) -> str:
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
    return done.stdout


if __name__ == "__main__":
    typer.run(main)
