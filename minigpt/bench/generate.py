"""Time decoding beside transformers, on one checkpoint and the same prompts, in turns, each in a separate process."""

import dataclasses
import os
import statistics
import tempfile
from contextlib import ExitStack, closing
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from minigpt.bench.contestant import Contestant, in_turns
from minigpt.checkpoint import save_pretrained
from minigpt.config import GPT2Config
from minigpt.device import HAS_BFLOAT16, Progress, Steps, processor_name, software
from minigpt.errors import ConfigError
from minigpt.model import GPT2
from minigpt.recipe import from_pretrained

PHASES = ("prefill_ms", "first_token_ms", "total_ms", "total_cpu_ms")


# Programs to time, as ``Contestant`` takes them.
OURS, MEMORY = "minigpt.bench.programs:Minigpt", "minigpt.bench.programs:Memory"
OTHERS = {"transformers": "minigpt.bench.programs:Transformers"}  # scripts/bench/others.py adds more
KINDS = {"transformers": {"int8": "float32"}}  # a program's names of our kinds, where they differ


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """What is timed.

    Attributes:
        model: a checkpoint, as ``from_pretrained`` takes it; None for random weights of the shape of ``preset``.
        preset: as ``GPT2Config.preset`` takes it.
        kind: "float32", "bfloat16", "float16", "float64" or "int8", what ours computes in.
        against: other programs, each NAME or NAME:KIND, for example "transformers:float32".
        batch: rows; more than one are ragged, from half of ``prompt_tokens`` to all of them.
        new_tokens: of each row, 2 or more.
        draft: as in ``generate``. For one text, ours without drafts is timed too, named "undrafted".

    Raises:
        ConfigError: if a program is unknown.
    """

    model: str | None = None
    preset: str = "gpt2"
    kind: str = "float32"
    against: tuple[str, ...] = ("transformers",)
    batch: int = 1
    prompt_tokens: int = 64
    new_tokens: int = 64
    repeats: int = 7
    draft: str | None = "auto"

    def __post_init__(self) -> None:
        for name in (entry.partition(":")[0] for entry in self.against):
            if name not in OTHERS:
                raise ConfigError(f"must be {' or '.join(OTHERS)}, got {name!r}", argument="against")

    @property
    def programs(self) -> dict[tuple[str, str], str]:
        """All programs by (name, kind), ours first and memory last. One without a kind has ours, in its own name."""
        is_drafted = self.draft is not None and self.batch == 1 and self.kind != "int8"
        programs = {(name, self.kind): OURS for name in ("minigpt", "undrafted")[: 1 + is_drafted]}
        for name, _, kind in (entry.partition(":") for entry in self.against):
            programs[name, kind or KINDS.get(name, {}).get(self.kind, self.kind)] = OTHERS[name]
        return programs | {("memory", self.kind): MEMORY}

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """Return random ids, the same for all programs."""
        shortest = self.prompt_tokens if self.batch == 1 else max(1, self.prompt_tokens // 2)
        lengths = torch.linspace(shortest, self.prompt_tokens, self.batch).round().int().tolist()
        generator = torch.Generator().manual_seed(0)
        return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]


def bench_generate(plan: BenchPlan, progress: Progress | None = None) -> dict[str, Any]:
    """Time every program and the limit ``plan.repeats`` times, in turns; return the report as JSON's own types.

    ``contestants`` has ours first. The memory of one is the peak of its process less that of ``import torch`` alone,
    with the files that it maps. Its ``total_cpu_ms``, the processor time of all threads, changes least on a busy
    machine. ``tokens_per_second`` counts the whole call, ``decode_tokens_per_second`` the tokens after the first.
    ``share_of_limit`` is of ours without drafts, which reads every weight for each token.

    Raises:
        CheckpointError, ConfigError: if the model cannot be loaded, or its context is too short.
        MiniGPTError: if a program failed.
    """
    begin = Steps(progress, total=1 + len(plan.programs) + plan.repeats)
    room = plan.prompt_tokens + plan.new_tokens
    with tempfile.TemporaryDirectory() as folder, ExitStack() as processes:
        begin("preparing the checkpoint")
        prompts, contestants = plan.prompts(_prepared(plan, folder).vocab_size), {}
        for (name, kind), home in plan.programs.items():
            begin(f"loading {name} at {kind}")
            draft = plan.draft if name == "minigpt" else None
            options = {"folder": folder, "prompts": prompts, "kind": kind, "draft": draft, "room": room}
            contestants[name, kind] = processes.enter_context(closing(Contestant(home, plan.new_tokens, **options)))
        rounds = (begin(f"round {number + 1} of {plan.repeats}") for number in range(plan.repeats))
        runs = in_turns({who: contestant.run for who, contestant in contestants.items()}, rounds)
    ours, *others, memory = (_figures(plan, *who, runs[who]) for who in plan.programs)
    step, limit = memory["step_bytes"], memory["decode_tokens_per_second"]
    undrafted = next((other for other in others if other["name"] == "undrafted"), ours)
    return {
        "plan": dataclasses.asdict(plan),
        "environment": environment() | {"decoding": ours["decoding"]},
        "contestants": [ours, *others],
        "limit": {"bandwidth_gb_s": limit / plan.batch * step / 1e9, "bytes_per_step": step, "by_memory": limit},
        "times_as_fast_as": {
            f"{other['name']}:{other['kind']}": {phase: _ratio(other, ours, phase) for phase in PHASES}
            for other in others
        },
        "share_of_limit": {"by_memory": undrafted["decode_tokens_per_second"] / limit},
    }


def _prepared(plan: BenchPlan, folder: str) -> GPT2Config:
    """Write the model to ``folder`` as a float32 checkpoint that all programs can load; return its config."""
    torch.manual_seed(0)
    if plan.model is None:
        model = GPT2(GPT2Config.preset(plan.preset))
    else:
        model = from_pretrained(plan.model, device="cpu", dtype="float32")
    prompt, new, context = plan.prompt_tokens, plan.new_tokens, model.config.n_positions
    if prompt + new > context:
        raise ConfigError(f"{prompt} prompt tokens and {new} new ones exceed the model's context of {context}")
    save_pretrained(model, folder)
    return model.config


def environment(*packages: str) -> dict[str, Any]:
    """Return the processor, its instructions, the threads and the load, and the versions of Python and packages."""
    return {
        "processor": processor_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "bfloat16_instructions": HAS_BFLOAT16,
        "vnni": torch.cpu._is_vnni_supported(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
        **software("transformers", *packages),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Return the median, and the 20th and 80th percentile."""
    shares = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64))
    return dict(zip(("median", "p20", "p80"), shares.tolist(), strict=True))


def _figures(plan: BenchPlan, name: str, kind: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    times = {phase: spread([run[phase] for run in runs]) for phase in PHASES}
    after_first = statistics.median(run["total_ms"] - run["first_token_ms"] for run in runs)
    rates = {
        "tokens_per_second": 1000 * plan.batch * plan.new_tokens / times["total_ms"]["median"],
        "decode_tokens_per_second": 1000 * plan.batch * (plan.new_tokens - 1) / after_first,
    }
    return runs[-1] | {"name": name, "kind": kind} | times | rates


def _ratio(other: dict[str, Any], ours: dict[str, Any], phase: str) -> float:
    """Return how many times as fast as ``other`` ours is, by medians."""
    return other[phase]["median"] / ours[phase]["median"]


def bench_summary(report: dict[str, Any]) -> RenderableType:
    """Return the times of all programs, their speeds, and the limit."""
    plan, machine, limit, ours = report["plan"], report["environment"], report["limit"], report["contestants"][0]
    share = report["share_of_limit"]["by_memory"]
    table = Table("", "prefill ms", "first token ms", "total ms", "tokens/s", "ours", "MiB", box=None, pad_edge=False)
    for one in report["contestants"]:
        table.add_row(
            f"{one['name']} {one['kind']}{', drafts' if one['acceptance'] is not None else ''}",
            *("{median:.0f} ({p20:.0f} to {p80:.0f})".format(**one[phase]) for phase in PHASES[:3]),
            f"{one['tokens_per_second']:.1f}",
            f"{_ratio(one, ours, 'total_ms'):.2f} x",
            f"{one['memory_mb']:.0f}",
        )
    head = (
        f"batch {plan['batch']}, prompt {plan['prompt_tokens']}, new {plan['new_tokens']}, medians (p20 to p80) of "
        f"{plan['repeats']} interleaved runs, {machine['threads']} threads, {machine['processor']}, "
        f"load average {machine['load_average']}"
    )
    notes = (
        f"limit: {limit['bytes_per_step'] / 2**20:.0f} MiB a step at the {limit['bandwidth_gb_s']:.1f} GB/s measured "
        f"are {limit['by_memory']:.1f} tokens/s; without drafts ours decodes at {share * limit['by_memory']:.1f}, "
        f"{share:.0%} of it, by {machine['decoding']}"
    )
    if ours["acceptance"] is not None:
        notes += f"\n{ours['acceptance']:.0%} of the drafted tokens were accepted"
    return Group(Text(head), table, Text(notes))
