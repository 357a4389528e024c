"""Time one decoding step of the kernel against the reading of memory, in turns: the share of the limit it reaches.

    python scripts/bench/decode_step.py --kind float32,bfloat16,int8 --rows 1 [--library FILE]... [--json FILE]

``--library`` compares builds of kernel.c; the default is the installed one.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import minigpt
from minigpt.engine import kernel, quantize_int8
from minigpt.engine.int8 import Int8Linear
from minigpt.engine.kernel import StepKernel

READ = 2**28  # bytes, more than caches hold
PAST = 96  # tokens that every row has read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt2")
    parser.add_argument("--kind", default="float32,bfloat16,int8")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--library", action="append", default=[])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    memory = torch.ones(READ // 4)
    runs: dict[str, Callable[[], object]] = {"memory": memory.sum}
    sizes = {"memory": READ}
    for kind in given.kind.split(","):
        for library in given.library or [""]:
            name = f"{kind} {Path(library).stem}".strip()
            runs[name], sizes[name] = prepared(given.preset, kind, given.rows, library)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(given.rounds):
        for name, run in runs.items():
            run()
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    found = {}
    for name, spread in times.items():
        speeds = {"median": statistics.median(spread), "least": min(spread)}
        shares = {
            which: sizes[name] / seconds / (READ / (statistics.median if which == "median" else min)(times["memory"]))
            for which, seconds in speeds.items()
        }
        found[name] = {"milliseconds": 1000 * speeds["median"], "least": 1000 * speeds["least"], "shares": shares}
        print(
            f"{name:20} {1000 * speeds['median']:7.2f} ms (least {1000 * speeds['least']:.2f}), "
            f"{sizes[name] / speeds['median'] / 1e9:5.1f} GB/s, of the limit {shares['median']:.2f} "
            f"(by the least {shares['least']:.2f})"
        )
    if given.json:
        given.json.write_text(json.dumps({"rows": given.rows, "preset": given.preset, "steps": found}, indent=2))


def prepared(preset: str, kind: str, rows: int, library: str) -> tuple[Callable[[], object], int]:
    """Return a step of ``rows`` rows, and the bytes of weights that it reads."""
    if library:
        os.environ["MINIGPT_KERNEL_LIBRARY"] = library
        kernel.functions.cache_clear()
    torch.manual_seed(0)
    model = minigpt.GPT2(minigpt.GPT2Config.preset(preset)).eval()
    if kind == "int8":
        quantize_int8(model)
    else:
        model.to(getattr(torch, kind))
    panels: list[int] = [part.panels.nbytes for part in model.modules() if isinstance(part, Int8Linear)]
    matrices = [p.nbytes for part in (model.h, model.ln_f) for p in part.parameters()]
    size = sum(panels) + sum(matrices) + (0 if panels else model.head_rows().nbytes)
    step, store = StepKernel(model), model.new_cache(rows, 2 * PAST).store.zero_()
    texts = list(range(rows))
    return lambda: step([5] * rows, texts, [0] * rows, [PAST] * rows, store), size


if __name__ == "__main__":
    main()
