"""Is a correct norm ever failed by noise? Seeded runs on the demo model and on a random one of GPT-2's full size.

python scripts/bench/seeded_parity.py --runs 50 --json docs/results/seeded-cpu.json

Every seed takes another dtype, attention and norm, and other short prompts, which leave little to average over.
The full-size model carries massive activations, as the pretrained GPT-2 does. The exit status is 1 where a run fails.
"""

import json
import random
import sys
import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import typer

import minigpt
from minigpt.device import environment

sys.path.insert(0, str(Path(__file__).parents[1]))  # scripts/

from bench.random_gpt2 import random_gpt2
from bench.results import JsonFile, keep

NORMS = ("textbook", "fused", "torch.nn:LayerNorm")
DTYPES = ("float32", "bfloat16", "float16")
FULL_SIZE_SEEDS = 5  # models; the prompts of every run are new


def main(json_file: JsonFile = None, runs: int = 50, full_size: bool = True) -> None:
    """Judge correct norms ``runs`` times on each model; print each ratio to the floor, and keep it with --json."""
    found: list[dict[str, Any]] = []
    for run in chain(demo_runs(runs), full_size_runs(runs) if full_size else ()):
        print(json.dumps(run), flush=True)
        found.append(run)
    results: dict[str, Any] = {
        "measured_on": environment(torch.get_num_threads()),
        "failed": sum(not run["passed"] for run in found),
        "largest_ratio": max(run["ratio"] for run in found),
        "largest_decoding_ratio": max(run["decoding_ratio"] or 0.0 for run in found),
        "runs": found,
    }
    keep(results, json_file)
    raise typer.Exit(int(results["failed"] > 0))


def demo_runs(runs: int) -> Iterator[dict[str, Any]]:
    """Runs on the bundled model."""
    for seed in range(runs):
        yield judge("demo", 1024, seed)


def full_size_runs(runs: int) -> Iterator[dict[str, Any]]:
    """Runs on a few random models, each of which takes its turn with every dtype."""
    for model in range(FULL_SIZE_SEEDS):
        with tempfile.TemporaryDirectory() as folder:
            minigpt.save_pretrained(random_gpt2(seed=model), folder)
            for seed in range(model, runs, FULL_SIZE_SEEDS):
                yield judge(folder, 50257, seed) | {"model": f"gpt2, random, seed {model}"}


def judge(source: str, vocab_size: int, seed: int) -> dict[str, Any]:
    """One verdict on a correct norm, under conditions and on prompts that the seed chooses."""
    draw = random.Random(seed)
    how: dict[str, Any] = dict(
        norm=NORMS[seed // 3 % 3], dtype=DTYPES[seed % 3], attention=("sdpa", "eager")[seed // 2 % 2]
    )
    prompts = [[draw.randrange(vocab_size) for _ in range(draw.randint(1, 8))] for _ in range(2)]
    report = minigpt.parity(source, prompts=prompts, max_new_tokens=draw.choice((0, 2, 6)), device="cpu", **how)
    found: dict[str, Any] = {"model": "demo", "seed": seed, **how, "prompts": [len(prompt) for prompt in prompts]}
    decoding = report.decoding.ratio if report.decoding else None
    return found | {
        "passed": report.passed, "ratio": report.logits.ratio, "decoding_ratio": decoding, "reasons": report.reasons
    }  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
