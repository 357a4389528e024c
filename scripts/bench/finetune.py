"""What does training with a schedule of swaps cost, beside transformers' own class under the same Trainer?

python scripts/bench/finetune.py --json docs/results/finetune-cpu.json

Both train the same random GPT-2 124M on the same rows, each in a separate process, in turns. The peak counts everything
from the start of the process.
"""

import itertools
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import typer

import minigpt
from minigpt.device import environment

sys.path.insert(0, str(Path(__file__).parents[1]))  # scripts/

from bench.random_gpt2 import random_gpt2
from bench.results import JsonFile, said_by, show
from demo.tales import tales

COMMON = """
import json, sys, time
from minigpt.bench import peak_mb

folder, text, steps, rows, block, out = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]), sys.argv[6]
times = {}
"""
OURS = """
from minigpt import Recipe
from minigpt.study import Training, finetune

training = Training(
    text, steps, schedule="h.*.ln_2@2, h.*.ln_1@4, ln_f@6", batch_size=rows, block_size=block, save_steps=10**6
)
recipe = Recipe(folder, norm="rms", device="cpu")
finetune(recipe, training, out, lambda what, share: times.setdefault(share, time.perf_counter()))
"""
THEIRS = """
import transformers
from minigpt import Recipe
from minigpt.study.training import Training, arguments, blocks, token_ids

class Mark(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        times[state.global_step] = time.perf_counter()

recipe, training = Recipe(folder, device="cpu"), Training(text, steps, batch_size=rows, save_steps=10**6)
ours, tokenizer = recipe.open()
train = blocks(text, token_ids(text, tokenizer, ours), block)
del ours
trainer = transformers.Trainer(
    model=transformers.GPT2LMHeadModel.from_pretrained(folder, dtype="float32"),
    args=arguments(recipe, training, out), train_dataset=train, callbacks=[Mark()],
)
trainer.train()
"""
END = """
print(json.dumps({"marks": list(times.values()), "peak_mb": round(peak_mb(), 1)}))
"""
WARMUP = 8  # steps before the medians begin; the last swap is at step 6


def main(
    json_file: JsonFile = None, steps: int = 20, rows: int = 2, block: int = 64, rounds: int = 2, threads: int = 2
) -> None:
    """Print, and with --json write, median seconds a step and the peak memory of both."""
    torch.set_num_threads(threads)
    found: dict[str, list[dict[str, float]]] = {"minigpt": [], "transformers": []}
    with tempfile.TemporaryDirectory() as place:
        model, text = Path(place) / "model", Path(place) / "text.txt"
        minigpt.save_pretrained(random_gpt2(), model, minigpt.Tokenizer.from_pretrained("demo"))
        text.write_text("\n".join(tales(400, 0)), encoding="utf-8")
        for number in range(rounds):
            for name, program in (("minigpt", OURS), ("transformers", THEIRS)):
                out = f"{place}/{name}{number}"
                found[name].append(_run(COMMON + program + END, model, text, steps, rows, block, out))
    costs = {
        name: {key: statistics.median(one[key] for one in each) for key in each[0]} for name, each in found.items()
    }
    ours, theirs = costs["minigpt"], costs["transformers"]
    results: dict[str, Any] = {
        "steps": steps, "rows": rows, "tokens_a_row": block, "rounds": rounds, **costs,
        "time_ratio": round(ours["step_s"] / theirs["step_s"], 3),
        "memory_ratio": round(ours["peak_mb"] / theirs["peak_mb"], 3),
        "measured_on": environment(threads),
    }  # fmt: skip
    show(results, json_file)


def _run(program: str, *words: object) -> dict[str, float]:
    said = said_by(program, *words)
    steps = [after - before for before, after in itertools.pairwise(said["marks"])]
    return {"step_s": round(statistics.median(steps[WARMUP:]), 4), "peak_mb": said["peak_mb"]}


if __name__ == "__main__":
    typer.run(main)
