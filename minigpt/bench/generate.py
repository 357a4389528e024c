"""Time minigpt against others on one checkpoint and the same prompts, in turns, each in a separate process."""

import dataclasses
import importlib.util
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from minigpt.bench.contestants import READ, TIMES, convert_for_ctranslate2, weight_bytes
from minigpt.bench.llama import GGML_TYPES, write_gguf
from minigpt.bench.worker import contestant
from minigpt.checkpoint import save_pretrained
from minigpt.config import GPT2Config
from minigpt.device import environment, in_turns
from minigpt.errors import ConfigError
from minigpt.model import GPT2
from minigpt.recipe import from_pretrained
from minigpt.report.steps import Progress, Steps

OTHERS = {"transformers": "transformers", "ctranslate2": "ctranslate2", "llama.cpp": "llama_cpp"}  # name: module
CONVERT = {"ctranslate2": convert_for_ctranslate2, "llama.cpp": write_gguf}
PHASES = ("prefill_ms", "first_token_ms", "total_ms", "total_cpu_ms")


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median, 20th and 80th percentile of several times."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(*np.percentile(values, (50, 20, 80)).tolist())


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """What is timed.

    Attributes:
        model: a checkpoint, as ``from_pretrained`` takes it; None for random weights of the shape of ``preset``.
        preset: as ``GPT2Config.preset`` takes it.
        kind: "float32", "bfloat16", "float16", "float64" or "int8", what ours computes in.
        against: other contestants, each NAME or NAME:KIND, for example "transformers:float32", "ctranslate2:int8" or
            "llama.cpp:q8_0". llama.cpp's kinds are f32, f16, bf16 and q8_0.
        batch: rows; more than one are ragged, from half of ``prompt_tokens`` to all of them.
        new_tokens: of each row, 2 or more.
        compiled: whether our steps are compiled.
        draft: as in ``generate``; ours without drafts is then a contestant too, named "undrafted".

    Raises:
        ConfigError: if a contestant is unknown, or its package is missing.
    """

    model: str | None = None
    preset: str = "gpt2"
    kind: str = "float32"
    against: tuple[str, ...] = ("transformers",)
    batch: int = 1
    prompt_tokens: int = 64
    new_tokens: int = 64
    repeats: int = 7
    compiled: bool = False
    draft: str | None = None

    def __post_init__(self) -> None:
        for name in (entry.partition(":")[0] for entry in self.against):
            if name not in OTHERS:
                raise ConfigError(f"unknown contestant {name!r}; known are {', '.join(OTHERS)}")
            if importlib.util.find_spec(OTHERS[name]) is None:
                extra = "llama" if name == "llama.cpp" else "bench"
                raise ConfigError(f"{name} is not installed; pip install 'minigpt[{extra}]', or leave it out")

    @property
    def contestants(self) -> list[tuple[str, str]]:
        """(name, kind) of all, ours first."""
        theirs = [entry.partition(":") for entry in self.against]
        ours = [("minigpt", self.kind)] + [("undrafted", self.kind)] * bool(self.draft)
        return ours + [(name, kind or self.kind_of(name)) for name, _, kind in theirs]

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """Return random ids, the same for all contestants."""
        shortest = self.prompt_tokens if self.batch == 1 else max(1, self.prompt_tokens // 2)
        lengths = torch.linspace(shortest, self.prompt_tokens, self.batch).round().int().tolist()
        generator = torch.Generator().manual_seed(0)
        return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]

    def kind_of(self, name: str) -> str:
        """Return the kind of a contestant that names none: ours, in its own words."""
        if name == "llama.cpp":
            return GGML_TYPES.get(self.kind, self.kind)
        return "float32" if name == "transformers" and self.kind == "int8" else self.kind


def bench_generate(plan: BenchPlan, progress: Progress | None = None) -> dict[str, Any]:
    """Time every contestant and the limit ``plan.repeats`` times, in turns; return the report as JSON's own types.

    ``contestants`` has ours first. The memory of one is the peak of its process less that of ``import torch`` alone,
    with the files that it maps. Its ``total_cpu_ms``, the processor time of all threads, changes least on a busy
    machine. ``tokens_per_second`` counts the whole call, ``decode_tokens_per_second`` the tokens after the first.

    Raises:
        CheckpointError, ConfigError: if the model cannot be loaded, or its context is too short.
        MiniGPTError: if a contestant failed.
    """
    plans = [("products", plan.kind), *plan.contestants]
    begin = Steps(progress, total=1 + len(plans) + plan.repeats)
    how = {
        "minigpt": {"compiled": plan.compiled, "draft": plan.draft},
        "llama.cpp": {"room": plan.prompt_tokens + plan.new_tokens},
    }
    with tempfile.TemporaryDirectory() as folder, ExitStack() as processes:
        begin("preparing the checkpoint")
        model = _prepared(plan, folder)
        common: dict[str, Any] = dict(folder=folder, prompts=plan.prompts(model.config.vocab_size), new=plan.new_tokens)
        asked = {}
        for name, kind in plans:
            begin(f"loading {name} at {kind}")
            if name in CONVERT:
                CONVERT[name](folder, kind)
            own = contestant(name, kind=kind, **common, **how.get(name, {}))
            asked[name, kind] = processes.enter_context(own)
        rounds = (begin(f"round {number + 1} of {plan.repeats}") for number in range(plan.repeats))
        runs = in_turns({who: lambda ask=ask: ask("run") for who, ask in asked.items()}, rounds)
        ends = {who: ask("describe") for who, ask in asked.items()}
    products, ours, *others = (_measured(plan, *who, runs[who], ends[who]) for who in plans)
    limit = _limit(products, weight_bytes(model), plan)
    return {
        "plan": dataclasses.asdict(plan),
        "environment": environment(torch.get_num_threads(), "llama-cpp-python")
        | {"decoding": ends["minigpt", plan.kind]["decoding"]},
        "contestants": [ours, *others],
        "limit": limit,
        "times_as_fast_as": {
            f"{other['name']}:{other['kind']}": {phase: _ratio(other, ours, phase) for phase in PHASES}
            for other in others
        },
        "share_of_limit": {by: ours["decode_tokens_per_second"] / limit[by] for by in ("by_memory", "by_products")},
    }


def _prepared(plan: BenchPlan, folder: str) -> GPT2:
    """Return the model, and write it to ``folder`` as a float32 checkpoint that all contestants can load."""
    if plan.model is None:
        torch.manual_seed(0)
        model = GPT2(GPT2Config.preset(plan.preset))
    else:
        model = from_pretrained(plan.model, device="cpu", dtype="float32")
    room = model.config.n_positions
    if plan.prompt_tokens + plan.new_tokens > room:
        raise ConfigError(
            f"{plan.prompt_tokens} prompt tokens and {plan.new_tokens} new ones exceed the model's context of {room}"
        )
    save_pretrained(model, folder)
    return model


def _measured(
    plan: BenchPlan, name: str, kind: str, runs: list[dict[str, float]], end: dict[str, Any]
) -> dict[str, Any]:
    """Return the figures of a contestant."""
    times = {phase: dataclasses.asdict(Spread.of([run[phase] for run in runs])) for phase in PHASES}
    after_first = statistics.median(run["total_ms"] - run["first_token_ms"] for run in runs)
    return {
        "name": name,
        "kind": kind,
        **times,
        "tokens_per_second": 1000 * plan.batch * plan.new_tokens / times["total_ms"]["median"],
        "decode_tokens_per_second": 1000 * plan.batch * (plan.new_tokens - 1) / after_first,
        "memory_mb": end["memory_mb"],
        "compilations": end["compilations"],
        "acceptance": end["acceptance"],
    }


def _limit(products: dict[str, Any], float32_bytes: int, plan: BenchPlan) -> dict[str, Any]:
    """Return the most tokens a second that the machine allows, in all rows.

    By memory: every step reads the weights once, at the speed of sums over much more than caches hold. By products: a
    step computes its matrix products by PyTorch, and nothing else.
    """
    bandwidth = READ * TIMES / (products["prefill_ms"]["median"] / 1000)  # bytes a second
    step = float32_bytes * getattr(torch, plan.kind).itemsize // torch.float32.itemsize
    return {
        "bandwidth_gb_s": bandwidth / 1e9,
        "bytes_per_step": step,
        "by_memory": plan.batch * bandwidth / step,
        "by_products": products["tokens_per_second"],
    }


def _ratio(other: dict[str, Any], ours: dict[str, Any], phase: str) -> float:
    """Return how many times as fast as ``other`` ours is, by medians."""
    return other[phase]["median"] / ours[phase]["median"]


def bench_summary(report: dict[str, Any]) -> RenderableType:
    """Return the times of all contestants, their speeds, and the limit."""
    plan, machine, limit, ours = report["plan"], report["environment"], report["limit"], report["contestants"][0]
    table = Table("", "prefill ms", "first token ms", "total ms", "tokens/s", "ours", "MiB",
                  box=None, pad_edge=False)  # fmt: skip
    for one in report["contestants"]:
        table.add_row(
            f"{one['name']} {one['kind']}",
            *("{median:.0f} ({p20:.0f} to {p80:.0f})".format(**one[phase]) for phase in PHASES[:3]),
            f"{one['tokens_per_second']:.1f}",
            f"{_ratio(one, ours, 'total_ms'):.2f} x",
            f"{one['memory_mb']:.0f}",
        )
    said = [
        f"batch {plan['batch']}, prompt {plan['prompt_tokens']}, new {plan['new_tokens']}, medians (p20 to p80) of "
        f"{plan['repeats']} interleaved runs, {machine['threads']} threads, {machine['processor']}, "
        f"load average {machine['load_average']}",
        f"limit: {limit['bytes_per_step'] / 2**20:.0f} MiB a step at the {limit['bandwidth_gb_s']:.1f} GB/s measured "
        f"are {limit['by_memory']:.1f} tokens/s, the products alone {limit['by_products']:.1f}; ours decodes at "
        f"{ours['decode_tokens_per_second']:.1f}, by {machine['decoding']}",
    ]
    if ours["acceptance"] is not None:
        said.append(f"{ours['acceptance']:.0%} of the drafted tokens were accepted")
    return Group(Text(said[0]), table, *map(Text, said[1:]))
