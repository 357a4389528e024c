"""Time one step of the kernel against its floors, in turns: the reading of memory, and products at a prompt's rate.

    python scripts/bench/decode_step.py --kind float32,bfloat16,int8 --rows 1,4,16 --past 64,900 --prompt 512

``--library`` compares builds of kernel.c, and ``--level`` levels of instructions; the default is the installed build at
the best level. Names of libraries' folders name the builds.
"""

import functools
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # scripts/

import torch
import typer
from bench.results import JsonFile, keep

import minigpt
from minigpt.bench.generate import environment
from minigpt.engine import accelerate, kernel, quantize_int8
from minigpt.engine.int8 import Int8Linear
from minigpt.engine.parts import head_rows
from minigpt.engine.step import StepKernel
from minigpt.machine import settle_memory

READ = 2**28  # bytes, more than caches hold


@dataclass
class Run:
    """What is timed, and what it reads and computes.

    Args:
        read: runs it once.
        size: bytes of weights and of keys and values that it reads.
        products: multiplications with weights.
        prompt: name of the prompt whose rate of products is its floor.
        most: rounds that time it.
    """

    read: Callable[[], object]
    size: int
    products: int = 0
    prompt: str = ""
    most: int = sys.maxsize
    seconds: list[float] = field(default_factory=list)


def main(
    preset: str = "gpt2", kind: str = "float32,bfloat16,int8", rows: str = "1", past: str = "96", prompt: str = "",
    rounds: int = 20, library: list[str] | None = None, level: str = "", json_file: JsonFile = None,
) -> None:  # fmt: skip
    """Time steps of ``rows`` new tokens, each after ``past`` tokens of its text, and steps that read a whole prompt."""
    if len({Path(build).parent.name for build in library or []}) < len(library or []):
        raise typer.BadParameter("the folders of two builds have one name, and they name the builds")
    settle_memory()  # as the command line does
    memory = torch.ones(READ // 4)
    runs = {"memory": Run(memory.sum, READ)}
    counts, lengths, prompts = ([int(n) for n in numbers.split(",") if n] for numbers in (rows, past, prompt))
    for storage in kind.split(","):
        model = model_of(preset, storage)
        blocks, head = products_of(model)
        cache = model.new_cache(max(counts), max([*lengths, *prompts]) + 1).store.zero_()
        for instructions, build in itertools.product(level.split(","), library or [""]):
            step = step_of(model, build, instructions)
            contestant = " ".join(filter(None, [storage, instructions, Path(build).parent.name]))
            names = [f"{contestant}, prompt of {tokens}" for tokens in prompts]
            for name, tokens in zip(names, prompts, strict=True):
                read = functools.partial(step, [5] * tokens, [0] * tokens, range(tokens), cache, [tokens - 1])
                runs[name] = Run(read, size_of(model), tokens * blocks + head, most=3)
            for count, length in itertools.product(counts, lengths):
                places = [5] * count, list(range(count)), [length] * count
                size = size_of(model) + count * length * cache[:, :, 0, :, 0].nbytes
                read = functools.partial(step, *places, cache)
                name = f"{contestant}, {count} after {length}"
                runs[name] = Run(read, size, count * (blocks + head), "".join(names[-1:]))
    for turn in range(rounds):
        for run in runs.values():
            if turn < run.most:
                time_once(run)
    keep({"preset": preset, "environment": environment(), "steps": {n: figures(n, runs) for n in runs}}, json_file)


def time_once(run: Run) -> None:
    start = time.perf_counter()
    run.read()
    run.seconds.append(time.perf_counter() - start)


def figures(name: str, runs: dict[str, Run]) -> dict[str, Any]:
    """Return and print a run's time, its floors and its ratio to the larger one."""
    run, memory = runs[name], runs["memory"]
    seconds = statistics.median(run.seconds)
    floors = {"memory": statistics.median(memory.seconds) * run.size / memory.size}
    if run.prompt:
        prompt = runs[run.prompt]
        floors["products"] = statistics.median(prompt.seconds) * run.products / prompt.products
    ratio = seconds / max(floors.values())
    limits = ", ".join(f"{floor} {1000 * value:.1f}" for floor, value in floors.items())
    print(f"{name:40} {1000 * seconds:7.2f} ms (least {1000 * min(run.seconds):.2f}), floors {limits}: {ratio:.2f}")
    return {
        "milliseconds": 1000 * seconds, "least": 1000 * min(run.seconds), "rounds": len(run.seconds),
        "floors": {floor: 1000 * value for floor, value in floors.items()}, "ratio": ratio,
    }  # fmt: skip


def model_of(preset: str, kind: str) -> Any:
    """Return a model with random weights in float32, bfloat16 or int8."""
    torch.manual_seed(0)
    model = accelerate(minigpt.GPT2(minigpt.GPT2Config.preset(preset))).eval()
    return quantize_int8(model) if kind == "int8" else model.to(getattr(torch, kind))


def step_of(model: Any, library: str, level: str) -> StepKernel:
    """Return the model's step by a build of the kernel, at a level of instructions."""
    if library:
        os.environ["MINIGPT_KERNEL_LIBRARY"] = library
    if level:
        kernel._CHOSEN = level
    kernel.load.cache_clear()
    return StepKernel(model)


def size_of(model: Any) -> int:
    """Return the bytes of weights that a step reads."""
    panels: list[int] = [part.panels.nbytes for part in model.modules() if isinstance(part, Int8Linear)]
    matrices = [p.nbytes for part in (model.h, model.ln_f) for p in part.parameters()]
    return sum(panels) + sum(matrices) + (0 if panels else head_rows(model).nbytes)


def products_of(model: Any) -> tuple[int, int]:
    """Return the weights of all blocks, and of the head."""
    config = model.config
    width = config.n_embd
    return config.n_layer * width * (4 * width + 2 * config.inner_size), config.vocab_size * width


if __name__ == "__main__":
    typer.run(main)
