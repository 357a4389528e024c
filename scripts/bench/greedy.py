"""Does minigpt write greedily, token for token, what transformers writes? On the demo and on a random GPT-2 124M.

python scripts/bench/greedy.py --json docs/results/greedy-cpu.json

Every prompt is continued at float32 by both. Where they part, the logits in float64 of the two likeliest tokens must be
within the noise, which is what transformers' own float32 is off by. The exit status is 1 where they are not, or where
weights that are laid out as the command line has them write anything else.
"""

import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import typer

import minigpt
from minigpt.engine import lay_out
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
    is_same = written(source, prompts, new_tokens) == written(source, prompts, new_tokens, lay_out)
    return asked | greedy | {"same_laid_out": is_same, "explained": explained and is_same}


def written(
    source: str, prompts: list[list[int]], new: int, laid_out: Callable[[minigpt.GPT2], object] = lambda model: None
) -> list[list[int]]:
    """Each prompt with its new tokens."""
    model = minigpt.from_pretrained(source, dtype="float32", device="cpu")
    laid_out(model)
    texts = (minigpt.generate(model, torch.tensor([ids]), max_new_tokens=new, eos_token_id=None) for ids in prompts)
    return [text[0].tolist() for text in texts]


if __name__ == "__main__":
    typer.run(main)
