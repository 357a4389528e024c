"""How soon is the first token there, and what does loading cost? Against transformers, in one run.

python scripts/bench/start.py --json docs/results/start-cpu.json

Both load the same random checkpoint of GPT-2 124M's shape, each time in a separate process, taking turns. Peak memory
is over that of a process that only imports torch. Nothing is warm but the page cache, which holds the file for both.
Linux only: the peak is read from /proc.
"""

import functools
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import typer

import minigpt
from minigpt.device import environment, in_turns

sys.path.insert(0, str(Path(__file__).parents[1]))  # scripts/

from bench.results import JsonFile, said_by, show

PROMPT = list(range(100, 116))  # 16 tokens

REPORT = """
first_token = time.perf_counter()
import json
from minigpt.bench import peak_mb  # of this program, not its parent; beside it, no more than names
print(json.dumps(dict(load_s=loaded - imported, first_token_s=first_token - started, peak_mb=peak_mb())))
"""

BARE = "import time; started = time.perf_counter(); import torch; imported = loaded = time.perf_counter()" + REPORT

MINIGPT = """
import sys, time
started = time.perf_counter()
import torch
from minigpt import from_pretrained, generate
imported = time.perf_counter()
model = from_pretrained(sys.argv[1], device="cpu")
loaded = time.perf_counter()
generate(model, torch.tensor([json_prompt]), max_new_tokens=1)
"""

TRANSFORMERS = """
import sys, time
started = time.perf_counter()
import torch
from transformers import GPT2LMHeadModel
imported = time.perf_counter()
model = GPT2LMHeadModel.from_pretrained(sys.argv[1])
loaded = time.perf_counter()
model.generate(torch.tensor([json_prompt]), max_new_tokens=1, do_sample=False, pad_token_id=0)
"""


def main(json_file: JsonFile = None, repeats: int = 7) -> None:
    """Print, and with --json write, medians over ``repeats`` interleaved runs."""
    programs = {"import torch": BARE, "minigpt": MINIGPT + REPORT, "transformers": TRANSFORMERS + REPORT}
    with tempfile.TemporaryDirectory() as folder:
        minigpt.save_pretrained(minigpt.GPT2(minigpt.GPT2Config.preset("gpt2")), folder)
        file_mb = (Path(folder) / "model.safetensors").stat().st_size / 2**20
        started = {
            name: functools.partial(said_by, program.replace("json_prompt", str(PROMPT)), folder)
            for name, program in programs.items()
        }
        runs = in_turns(started, range(repeats))
    results = _summary(runs, file_mb)
    show(results, json_file)


def _summary(runs: dict[str, list[dict[str, float]]], file_mb: float) -> dict[str, Any]:
    medians = {
        name: {key: round(statistics.median(run[key] for run in measured), 4) for key in measured[0]}
        for name, measured in runs.items()
    }
    ours, theirs = medians["minigpt"], medians["transformers"]
    return {
        "measured_on": environment(torch.get_num_threads()),
        "file_mb": round(file_mb, 1),
        "repeats": len(runs["minigpt"]),
        "medians": medians,
        "first_token_ratio": round(ours["first_token_s"] / theirs["first_token_s"], 3),
        "peak_mb_over_import_torch": round(ours["peak_mb"] - medians["import torch"]["peak_mb"], 1),
    }


if __name__ == "__main__":
    typer.run(main)
