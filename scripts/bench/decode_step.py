"""Time one step of the kernel against the reading of memory, in turns: the share of the limit it reaches.

    python scripts/bench/decode_step.py --kind float32,bfloat16,int8 --rows 1,4,16 --past 64,900 --prompt 512

``--library`` compares builds of kernel.c; the default is the installed one.
"""

import argparse
import functools
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import minigpt
from minigpt.engine import accelerate, kernel, quantize_int8
from minigpt.engine.int8 import Int8Linear
from minigpt.engine.kernel import StepKernel
from minigpt.engine.parts import head_rows

READ = 2**28  # bytes, more than caches hold


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt2")
    parser.add_argument("--kind", default="float32,bfloat16,int8")
    parser.add_argument("--rows", default="1", help="new tokens of a step, each of another text")
    parser.add_argument("--past", default="96", help="tokens that every text has read")
    parser.add_argument("--prompt", default="", help="tokens of a prompt that is read at once")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--library", action="append", default=[])
    parser.add_argument("--json", type=Path)
    supplied = parser.parse_args()
    memory = torch.ones(READ // 4)
    runs: dict[str, Callable[[], object]] = {"memory": memory.sum}
    sizes = {"memory": READ}
    counts, lengths, prompts = (
        [int(n) for n in numbers.split(",") if n] for numbers in (supplied.rows, supplied.past, supplied.prompt)
    )
    for kind in supplied.kind.split(","):
        for library in supplied.library or [""]:
            step, cache, size = prepared(supplied.preset, kind, max(counts), max([*lengths, *prompts]), library)
            for rows, past in itertools.product(counts, lengths):
                name = f"{kind} {Path(library).stem}".strip() + f", {rows} after {past}"
                places = [5] * rows, list(range(rows)), [past] * rows
                runs[name], sizes[name] = functools.partial(step, *places, cache), size
            for tokens in prompts:
                name, places = f"{kind} {Path(library).stem}".strip() + f", prompt of {tokens}", range(tokens)
                read = functools.partial(step, [5] * tokens, [0] * tokens, places, cache, [tokens - 1])
                runs[name], sizes[name] = read, size
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(supplied.rounds):
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
    if supplied.json:
        supplied.json.write_text(json.dumps({"preset": supplied.preset, "steps": actual}, indent=2))


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
    main()
