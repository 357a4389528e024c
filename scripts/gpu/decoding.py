"""GPT-2 124M in bfloat16: ours from a graph, by each norm and compiled, against transformers by default and compiled.

Whole calls in turns, every token greedy, no text ends early. The limit is the time of reading the weights once, at
the rate of a plain copy in the same run.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu.models import known_norms, ours_of, theirs_of, with_norm
from torch import Tensor

import minigpt
from minigpt.bench.contestants import weight_bytes
from minigpt.device import dtype_name, finish, in_turns, wall_seconds
from minigpt.engine import compile_steps
from minigpt.generation.decode import rows_of, write_rows
from minigpt.generation.settings import parse_settings
from minigpt.judge.reference import quiet_transformers

BATCHES = (1, 64, 8, 32, 2)  # the telling ones first; at the first alone, what takes a compiler its time
PROMPT, NEW, REPEATS = 64, 256, 5
SETTLED = 32  # tokens of a text after which a step is counted: the prompt is read and the graph recorded by then

Row = dict[str, Any]
Timed = Callable[[Tensor], tuple[float, float | None]]  # seconds of a whole call, and of one settled step


def decoding(results: dict[str, Any], device: torch.device, quick: bool) -> Iterator[str]:
    """Into ``results``: a row for each batch and contestant; the rate of a copy, and the limit that follows from it."""
    yield "the models"
    weights = ours_of("gpt2", device, quick).to(torch.float32 if quick else torch.bfloat16)
    new, repeats = (SETTLED + 2, 1) if quick else (NEW, REPEATS)
    copied = copy_rate(device, quick)
    results |= {
        "dtype": dtype_name(weights.wte.weight.dtype), "prompt_tokens": PROMPT, "new_tokens": new,
        "copy_gb_per_s": copied / 1e9, "weight_bytes": weight_bytes(weights),
        "limit_ms": 1e3 * weight_bytes(weights) / copied, "rows": [], "absent": {},
    }  # fmt: skip
    runners = contestants(weights, new, device)
    for batch in (1, 2) if quick else BATCHES:
        yield f"batch {batch}"
        ids = torch.randint(weights.config.vocab_size, (batch, PROMPT), device=device)
        for name, why in failing(runners, ids, twice=batch == 1).items():
            results["absent"][f"{name}, batch {batch}"] = why
        able = {name: run for name, run in runners.items() if f"{name}, batch {batch}" not in results["absent"]}
        turns = in_turns({name: functools.partial(run, ids) for name, run in able.items()}, range(repeats))
        for name, times in turns.items():
            results["rows"].append({"decoder": name, "batch": batch} | told(times, batch, new, results["limit_ms"]))
        runners = {name: run for name, run in runners.items() if "compiled" not in name}


def contestants(weights: minigpt.GPT2, new: int, device: torch.device) -> dict[str, Timed]:
    """By name, what continues ids (B, T) by ``new`` tokens and says how long that took."""
    timed = ("fused", "triton") if device.type == "cuda" else ("fused",)  # interpreted, no time tells a thing
    ours = {norm: with_norm(weights, norm, "sdpa", "fast") for norm in known_norms(timed, device)}
    theirs = theirs_of(weights, "sdpa")
    theirs.generation_config.eos_token_id, theirs.generation_config.pad_token_id = None, 0
    runners = {f"minigpt {norm}": by_ours(model, new) for norm, model in ours.items()}
    if device.type == "cuda":
        compiled = compile_steps(with_norm(weights, "fused", "sdpa", "fast"), dynamic=False)
        runners["minigpt fused, compiled"] = by_ours(compiled, new)
    runners["transformers"] = by_theirs(theirs, new)
    runners["transformers, static cache, compiled"] = by_theirs(theirs, new, cache_implementation="static")
    return runners


def by_ours(model: minigpt.GPT2, new: int) -> Timed:
    """What ``generate`` does, with a clock at the tokens."""
    settings = parse_settings(max_new_tokens=new, eos_token_id=None)

    def run(ids: Tensor) -> tuple[float, float | None]:
        finish(ids.device)
        start = time.perf_counter()
        rows = rows_of(model, ids.tolist(), settings, None)
        clock = [time.perf_counter() for _ in write_rows(model, rows, settings, len(rows))]
        assert all(len(row.new_ids) == new for row in rows)
        settled, last = clock[SETTLED * len(rows) - 1], clock[-1]
        return time.perf_counter() - start, (last - settled) / (new - SETTLED)

    return run


def by_theirs(model: Any, new: int, **how: Any) -> Timed:
    """transformers' own ``generate``."""

    def run(ids: Tensor) -> tuple[float, float | None]:
        finish(ids.device)
        start = time.perf_counter()
        with quiet_transformers():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, **how)
        assert out.shape[1] == ids.shape[1] + new
        finish(ids.device)
        return time.perf_counter() - start, None

    return run


def failing(runners: dict[str, Timed], ids: Tensor, twice: bool) -> dict[str, str]:
    """Warm everybody up, ``twice`` where there are compilers at work. Who cannot run, and why."""
    found = {}
    for name, run in runners.items():
        try:
            for _ in range(1 + twice):
                run(ids)
        except Exception as error:  # somebody else's compiler may raise anything, and the others are still to be timed
            found[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return found


def told(times: list[tuple[float, float | None]], batch: int, new: int, limit_ms: float) -> Row:
    """Medians. A step is timed apart from prompt and recording where tokens can be seen coming."""
    whole = [seconds for seconds, _ in times]
    steps = [step for _, step in times if step is not None]
    step_ms = 1e3 * statistics.median(steps) if steps else None
    return {
        "call_s": statistics.median(whole), "call_s_least": min(whole), "call_s_most": max(whole),
        "tokens_per_s": batch * new / statistics.median(whole), "step_ms": step_ms,
        "step_over_limit": step_ms / limit_ms if step_ms else None,
    }  # fmt: skip


def copy_rate(device: torch.device, quick: bool) -> float:
    """Bytes a second, read and written, of a copy much larger than any cache: the best of ten."""
    source = torch.zeros(2**20 if quick else 2**31, dtype=torch.uint8, device=device)
    room = torch.empty_like(source)
    return 2 * source.nbytes / min(wall_seconds(lambda: room.copy_(source), 1, device) for _ in range(10))
