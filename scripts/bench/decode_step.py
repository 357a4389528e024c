"""Time one step of the kernel against the reading of memory, in turns: the share of the limit it reaches.

    python scripts/bench/decode_step.py --kind float32,bfloat16,int8 --rows 1,4,16 --past 64,900 --prompt 512

``--library`` compares builds of kernel.c; the default is the installed one.
"""

import functools
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # scripts/

import torch
import typer
from bench.results import JsonFile, keep
from torch import Tensor

import minigpt
from minigpt.engine import accelerate, kernel, quantize_int8
from minigpt.engine.int8 import Int8Linear
from minigpt.engine.parts import head_rows
from minigpt.engine.step import StepKernel
from minigpt.machine import settle_memory

READ = 2**28  # bytes, more than caches hold


def main(
    preset: str = "gpt2", kind: str = "float32,bfloat16,int8", rows: str = "1", past: str = "96", prompt: str = "",
    rounds: int = 20, library: list[str] | None = None, json_file: JsonFile = None,
) -> None:  # fmt: skip
    """Time steps of ``rows`` new tokens, each after ``past`` tokens of its text, and steps that read a whole prompt."""
    settle_memory()  # as the command line does
    memory = torch.ones(READ // 4)
    runs: dict[str, Callable[[], object]] = {"memory": memory.sum}
    sizes = {"memory": READ}
    counts, lengths, prompts = ([int(n) for n in numbers.split(",") if n] for numbers in (rows, past, prompt))
    for storage, build in itertools.product(kind.split(","), library or [""]):
        step, cache, size = prepared(preset, storage, max(counts), max([*lengths, *prompts]), build)
        contestant = f"{storage} {Path(build).stem}".strip()
        for count, length in itertools.product(counts, lengths):
            name, places = f"{contestant}, {count} after {length}", ([5] * count, list(range(count)), [length] * count)
            runs[name], sizes[name] = functools.partial(step, *places, cache), size
        for tokens in prompts:
            read = functools.partial(step, [5] * tokens, [0] * tokens, range(tokens), cache, [tokens - 1])
            runs[f"{contestant}, prompt of {tokens}"], sizes[f"{contestant}, prompt of {tokens}"] = read, size
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            run()
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    actual = {}
    for name, spread in times.items():
        speeds = {"median": statistics.median(spread), "least": min(spread)}
        shares = {
            which: sizes[name] / seconds / (READ / (statistics.median if which == "median" else min)(times["memory"]))
            for which, seconds in speeds.items()
        }
        actual[name] = {"milliseconds": 1000 * speeds["median"], "least": 1000 * speeds["least"], "shares": shares}
        print(
            f"{name:30} {1000 * speeds['median']:7.2f} ms (least {1000 * speeds['least']:.2f}), "
            f"{sizes[name] / speeds['median'] / 1e9:5.1f} GB/s, of the limit {shares['median']:.2f} "
            f"(by the least {shares['least']:.2f})"
        )
    keep({"preset": preset, "steps": actual}, json_file)


def prepared(preset: str, kind: str, rows: int, past: int, library: str) -> tuple[StepKernel, Tensor, int]:
    """Return a step, a cache for so many rows and tokens, and the bytes of weights that the step reads."""
    if library:
        os.environ["MINIGPT_KERNEL_LIBRARY"] = library
        kernel.load.cache_clear()
    torch.manual_seed(0)
    model = accelerate(minigpt.GPT2(minigpt.GPT2Config.preset(preset))).eval()
    if kind == "int8":
        quantize_int8(model)
    else:
        model.to(getattr(torch, kind))
    panels: list[int] = [part.panels.nbytes for part in model.modules() if isinstance(part, Int8Linear)]
    matrices = [p.nbytes for part in (model.h, model.ln_f) for p in part.parameters()]
    size = sum(panels) + sum(matrices) + (0 if panels else head_rows(model).nbytes)
    return StepKernel(model), model.new_cache(rows, past + 1).store.zero_(), size


if __name__ == "__main__":
    typer.run(main)
