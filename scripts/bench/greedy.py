"""Does minigpt write greedily, token for token, what transformers writes? On the demo and on a random GPT-2 124M.

python scripts/bench/greedy.py --json docs/results/greedy-cpu.json

Both continue every prompt in float32. Where they differ, the float64 logits of the two likeliest tokens must be closer
than the noise, the error of transformers' own float32. The exit status is 1 if they are not.
"""

import random
import sys
import tempfile
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


def main(
    json_file: JsonFile = None,
    prompts: int = 20,
    new_tokens: int = 64,
    full_size: bool = True,
) -> None:
    """Print, and with --json write, how many tokens were compared and where they first part."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = minigpt.Tokenizer.from_pretrained("demo")
        models = {"demo": ("demo", [tokenizer.encode(tale(seed))[:12] for seed in range(prompts)])}
        if full_size:
            minigpt.save_pretrained(random_gpt2(), folder, tokenizer)
            models["gpt2, random"] = (folder, mixed(prompts, 50257))
        found = {name: compared(*of, new_tokens) for name, of in models.items()}
    results: dict[str, Any] = {"measured_on": environment(torch.get_num_threads()), "models": found}
    show(results, json_file)
    raise typer.Exit(int(not all(of["explained"] for of in found.values())))


def mixed(prompts: int, vocabulary: int) -> list[list[int]]:
    """Random ids in lengths from 1 to 40."""
    draw = random.Random(0)
    return [[draw.randrange(vocabulary) for _ in range(draw.randint(1, 40))] for _ in range(prompts)]


def compared(source: str, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """What a judgement of the model as it is says about its greedy tokens."""
    report = minigpt.parity(source, prompts=prompts, max_new_tokens=new_tokens, dtype="float32", device="cpu")
    greedy, parting = report.to_dict()["greedy"], report.greedy.first_divergence
    asked = {"prompts": len(prompts), "new_tokens": new_tokens}
    explained = parting is None or parting.within_noise
    return asked | greedy | {"explained": explained}


if __name__ == "__main__":
    typer.run(main)
