"""What does a judgement with everything switched on cost at GPT-2's size, in seconds and in memory?

python scripts/bench/parity.py --json docs/results/parity-cpu.json

The checkpoint is the random GPT-2 124M of random_gpt2.py. Each run is `minigpt parity` in a separate process, imports
included, with the ordinary differences, the sensitivity, the bisection, a text's perplexity and the page.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import typer

import minigpt
from minigpt.measure.environment import environment

sys.path.insert(0, str(Path(__file__).parents[1]))  # scripts/

from bench.random_gpt2 import random_gpt2
from bench.results import JsonFile, show
from demo.tales import tale

WORDS = ("parity", "--noise", "--sensitivity", "--bisect", "--device", "cpu")


def main(json_file: JsonFile = None, norm: str = "textbook", repeats: int = 3) -> None:
    """Print, and with --json write, the seconds and the megabytes of ``repeats`` runs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        minigpt.save_pretrained(random_gpt2(), folder / "model", minigpt.Tokenizer.from_pretrained("demo"))
        (folder / "text").write_text("\n".join(tale(seed) for seed in range(12)), encoding="utf-8")
        runs = [_run(folder, norm) for _ in range(repeats)]
    results: dict[str, Any] = {
        "measured_on": environment(torch.get_num_threads()),
        "norm": norm,
        "options": WORDS,
        "seconds_median": round(statistics.median(run["seconds"] for run in runs), 1),
        "peak_mb": max(run["peak_mb"] for run in runs),
        "runs": runs,
    }
    show(results, json_file)


def _run(folder: Path, norm: str) -> dict[str, Any]:
    files = {option: str(folder / f"report.{option}") for option in ("json", "html")}
    words = [*WORDS, "--model", str(folder / "model"), "--norm", norm, "--text", str(folder / "text")]
    words += [word for option, file in files.items() for word in (f"--{option}", file)]
    start = time.perf_counter()
    process = os.posix_spawn(
        sys.executable, [sys.executable, "-m", "minigpt", *words], os.environ | {"COLUMNS": "100"},
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )  # fmt: skip
    _, status, usage = os.wait4(process, 0)
    seconds = time.perf_counter() - start
    report = json.loads(Path(files["json"]).read_text(encoding="utf-8"))
    return {
        "exit_status": os.waitstatus_to_exitcode(status),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_mb": usage.ru_maxrss * 1024 // 10**6,
        "page_mb": os.path.getsize(files["html"]) / 10**6,
        "text_tokens": report["perplexity"]["tokens"],
        "ratio": report["logits"]["ratio"],
    }


if __name__ == "__main__":
    typer.run(main)
