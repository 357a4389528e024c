"""What continuous batching and prompt lookup bring on this machine.

python scripts/bench/engine.py --json docs/results/engine-cpu.json

The engine writes many prompts of mixed lengths in 16 places, against the same prompts 16 at a time, each batch until
its last row is over. Lookup writes greedily with a draft and without. The contestants take turns; medians are compared.
"""

import functools
import random
import statistics
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import typer

import minigpt
from minigpt.generation import Prompt, complete
from minigpt.generation.padding import left_padded
from minigpt.generation.row import TextCodec
from minigpt.measure.environment import environment
from minigpt.measure.stopwatch import in_turns

sys.path.insert(0, str(Path(__file__).parents[1]))  # scripts/

from bench.results import JsonFile, keep, show

PLACES = 16
WORDS = ("the", "old", "sailor", "and", "a", "dog", "saw", "one", "light", "over", "water", "before", "it", "was")


class Numbers:
    """As many tokens as words, for a model whose weights have no language."""

    end_of_text_id = 50256

    def encode(self, text: str) -> list[int]:
        return [zlib.crc32(word.encode()) % 50000 for word in text.split()]

    def decode_bytes(self, ids: list[int]) -> bytes:
        return b" ".join(str(token).encode() for token in ids) + b" "


def main(
    json_file: JsonFile = None,
    repeats: int = 3,
    prompts: int = 1000,
    large_prompts: int = 48,
    most_new: int = 60,
    threads: int = 2,
) -> None:
    """Print, and with --json write, medians over ``repeats`` interleaved runs of what the command line does."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    demo, tokenizer = minigpt.from_pretrained("demo", device="cpu"), minigpt.Tokenizer.from_pretrained("demo")
    large = minigpt.GPT2(minigpt.GPT2Config.preset("gpt2")).eval()
    mixed: dict[str, tuple[minigpt.GPT2, TextCodec, int]] = {f"demo, {prompts} prompts": (demo, tokenizer, prompts)}
    if large_prompts:
        mixed[f"gpt2 at random, {large_prompts} prompts"] = (large, Numbers(), large_prompts)
    repetitive: dict[str, tuple[minigpt.GPT2, TextCodec]] = {
        "demo, repetitive": (demo, tokenizer),
        "gpt2 at random, repetitive": (large, Numbers()),
    }
    results: dict[str, Any] = {"measured_on": environment(threads), "repeats": repeats, "engine": {}, "lookup": {}}
    for name, (model, codec) in repetitive.items():
        results["lookup"][name] = _lookup(model, codec, repeats)
        keep(results, json_file)  # so that an end before the last measure loses little
    for name, (model, codec, count) in mixed.items():
        results["engine"][name] = _engine(model, codec, _prompts(count, most_new), repeats)
        keep(results, json_file)
    show(results, json_file)


def _prompts(count: int, most_new: int) -> list[Prompt]:
    """Texts of 1 to 40 words, each to be continued by 1 to ``most_new`` tokens, evenly as chance has it."""
    chance = random.Random(0)
    return [
        Prompt(" ".join(chance.choices(WORDS, k=chance.randint(1, 40))), max_new_tokens=chance.randint(1, most_new))
        for _ in range(count)
    ]


def _engine(model: minigpt.GPT2, tokenizer: TextCodec, prompts: list[Prompt], repeats: int) -> dict[str, Any]:
    how: dict[str, Any] = {"max_new_tokens": 1, "eos_token_id": None}

    def engine() -> int:
        return sum(len(text.ids) for text in complete(model, tokenizer, prompts, batch_size=PLACES, **how))

    def in_turn() -> int:
        """Each batch is one call of ``generate``, which runs until the longest of its rows is done."""
        tokens = 0
        for first in range(0, len(prompts), PLACES):
            some = prompts[first : first + PLACES]
            ids, mask = left_padded([tokenizer.encode(prompt.text) for prompt in some])
            longest = max(prompt.max_new_tokens or 0 for prompt in some)
            minigpt.generate(model, ids, mask, max_new_tokens=longest, eos_token_id=None)
            tokens += sum(prompt.max_new_tokens or 0 for prompt in some)
        return tokens

    return _interleaved({"engine": engine, "batches of 16": in_turn}, repeats)


def _lookup(model: minigpt.GPT2, tokenizer: TextCodec, repeats: int) -> dict[str, Any]:
    """A text that says the same again and again; ``same_tokens`` is measured as well."""
    ids = torch.tensor([tokenizer.encode("The dog saw the light. " * 10)[:64]])
    how: dict[str, Any] = {"max_new_tokens": 64, "eos_token_id": None}
    written: dict[str, list[int]] = {}

    def write(name: str, **drafted: Any) -> int:
        written[name] = minigpt.generate(model, ids, **how, **drafted)[0].tolist()
        return 64

    ways: dict[str, Callable[[], int]] = {
        "lookup of 10": lambda: write("lookup", prompt_lookup_num_tokens=10),
        "plain": lambda: write("plain"),
    }
    return {**_interleaved(ways, repeats), "same_tokens": written["lookup"] == written["plain"]}


def _timed(way: Callable[[], int]) -> tuple[int, float]:
    """Tokens, and seconds."""
    started = time.perf_counter()
    return way(), time.perf_counter() - started


def _interleaved(ways: dict[str, Callable[[], int]], repeats: int) -> dict[str, Any]:
    """Median seconds and tokens a second of each, and how much faster the first is than the second."""
    runs = in_turns({name: functools.partial(_timed, way) for name, way in ways.items()}, range(repeats))
    medians = {name: statistics.median(seconds for _, seconds in told) for name, told in runs.items()}
    tokens = next(iter(runs.values()))[0][0]
    first, second = medians.values()
    return {
        "tokens": tokens,
        "seconds": {name: round(median, 3) for name, median in medians.items()},
        "tokens_per_second": {name: round(tokens / median, 1) for name, median in medians.items()},
        "ratio": round(second / first, 2),
    }


if __name__ == "__main__":
    typer.run(main)
