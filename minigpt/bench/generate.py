"""Time decoding against transformers, on one checkpoint and the same prompts, in turns, each in a separate process."""

import dataclasses
import os
import statistics
import tempfile
from contextlib import ExitStack, closing
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.text import Text

from minigpt.bench.contestant import Contestant, in_turns
from minigpt.checkpoint.norms import described_norms, norm_fields
from minigpt.checkpoint.save import save_pretrained
from minigpt.config import GPT2Config
from minigpt.errors import ConfigError
from minigpt.machine import HAS_BFLOAT16, processor_name, software
from minigpt.model import GPT2
from minigpt.progress import Progress, Steps
from minigpt.recipe import from_pretrained
from minigpt.report.numerals import count, times
from minigpt.report.part import Cell, Number, Part
from minigpt.report.terminal import printed

PHASES = ("prefill_ms", "first_token_ms", "total_ms", "total_cpu_ms")
DECODE_RATE = "decode_tokens_per_second"
Runs = dict[tuple[str, str], list[dict[str, Any]]]


# Programs to time, as ``Contestant`` takes them.
MINIGPT = "minigpt.bench.programs:Minigpt"
MEMORY = "minigpt.bench.programs:Memory"
OTHERS = {"transformers": "minigpt.bench.programs:Transformers"}  # scripts/bench/others.py adds more
KIND_NAMES = {"transformers": {"int8": "float32"}}  # a program's names of our kinds, where they differ


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """The plan of a benchmark.

    Attributes:
        model: a checkpoint, as ``from_pretrained`` takes it; None for random weights of the shape of ``preset``.
        preset: as ``GPT2Config.preset`` takes it.
        kind: "float32", "bfloat16", "float16", "float64" or "int8", what ours computes in.
        against: other programs, each NAME or NAME:KIND, for example "transformers:float32".
        batch: rows.
        same_length: whether all rows have ``prompt_tokens``; else they are ragged, from half of them to all.
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
    same_length: bool = False
    new_tokens: int = 64
    repeats: int = 7
    draft: str | None = "auto"

    def __post_init__(self) -> None:
        for entry in self.against:
            name = entry.partition(":")[0]
            if name not in OTHERS:
                raise ConfigError(f"must be {' or '.join(OTHERS)}, got {name!r}", argument="against")

    @property
    def programs(self) -> dict[tuple[str, str], str]:
        """All programs by (name, kind), ours first and memory last. One without a kind has ours, in its own name."""
        programs = {("minigpt", self.kind): MINIGPT}
        is_drafted = self.draft is not None and self.batch == 1 and self.kind != "int8"
        if is_drafted:
            programs["undrafted", self.kind] = MINIGPT
        for entry in self.against:
            name, _, kind = entry.partition(":")
            if not kind:
                own_names = KIND_NAMES.get(name, {})
                kind = own_names.get(self.kind, self.kind)
            programs[name, kind] = OTHERS[name]
        programs["memory", self.kind] = MEMORY
        return programs

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """Return random ids, the same for all programs."""
        longest = self.prompt_tokens
        shortest = longest
        if self.batch > 1 and not self.same_length:
            shortest = max(1, longest // 2)
        lengths = torch.linspace(shortest, longest, self.batch)
        generator = torch.Generator().manual_seed(0)
        prompts = []
        for length in lengths.round().int().tolist():
            ids = torch.randint(vocabulary, (length,), generator=generator)
            prompts.append(ids.tolist())
        return prompts


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
    runs = _timed_in_turns(plan, progress)
    figures = {}
    for name, kind in plan.programs:
        figures[name, kind] = _figures(plan, name, kind, runs[name, kind])
    memory = figures.pop(("memory", plan.kind))
    ours, *others = figures.values()
    undrafted = figures.get(("undrafted", plan.kind), ours)
    share = undrafted[DECODE_RATE] / memory[DECODE_RATE]
    machine = environment() | {"decoding": ours["decoding"]}
    return {
        "plan": dataclasses.asdict(plan),
        "environment": machine,
        "contestants": [ours, *others],
        "limit": _limit(plan, memory),
        "times_as_fast_as": _ratios(ours, others),
        "share_of_limit": {"by_memory": share},
    }


def _timed_in_turns(plan: BenchPlan, progress: Progress | None) -> Runs:
    """Start the process of every program, and return what each measured in every round, by (name, kind)."""
    begin = Steps(progress, total=1 + len(plan.programs) + plan.repeats)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as processes:
        begin("preparing the checkpoint")
        config = _prepared(plan, folder)
        prompts = plan.prompts(config.vocab_size)
        calls = {}
        for (name, kind), home in plan.programs.items():
            begin(f"loading {name} at {kind}")
            contestant = Contestant(
                home, plan.new_tokens, folder=folder, prompts=prompts, kind=kind,
                draft=plan.draft if name == "minigpt" else None, room=plan.prompt_tokens + plan.new_tokens,
            )  # fmt: skip
            processes.enter_context(closing(contestant))
            calls[name, kind] = contestant.run
        rounds = (begin(f"round {number + 1} of {plan.repeats}") for number in range(plan.repeats))
        return in_turns(calls, rounds)


def _limit(plan: BenchPlan, memory: dict[str, Any]) -> dict[str, Any]:
    """Return the speed at which memory is read, and the tokens a second that it allows."""
    rate = memory[DECODE_RATE]
    step_bytes = memory["step_bytes"]
    steps_per_second = rate / plan.batch
    return {
        "bandwidth_gb_s": steps_per_second * step_bytes / 1e9,
        "bytes_per_step": step_bytes,
        "by_memory": rate,
    }


def _ratios(ours: dict[str, Any], others: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return how many times as fast as each other program ours is, by phase."""
    ratios = {}
    for other in others:
        name = f"{other['name']}:{other['kind']}"
        ratios[name] = {phase: _ratio(other, ours, phase) for phase in PHASES}
    return ratios


def _prepared(plan: BenchPlan, folder: str) -> GPT2Config:
    """Write the model to ``folder`` as a float32 checkpoint that all programs can load; return its config.

    Raises:
        CheckpointError, ConfigError, NormError: if the model cannot be opened, its context is too short, or it has
            another norm than LayerNorm.
    """
    torch.manual_seed(0)
    if plan.model is None:
        model = GPT2(GPT2Config.preset(plan.preset))
    else:
        model = from_pretrained(plan.model, device="cpu", dtype="float32")
    if norm_fields(model) and plan.against:
        reason = f"has other norms than LayerNorm, {described_norms(model)}, which no other program has"
        raise ConfigError(reason, argument="model")
    prompt = plan.prompt_tokens
    new = plan.new_tokens
    context = model.config.n_positions
    if prompt + new > context:
        raise ConfigError(f"{prompt} prompt tokens and {new} new ones exceed the model's context of {context}")
    save_pretrained(model, folder)
    return model.config


def environment(*packages: str) -> dict[str, Any]:
    """Return the processor, its instructions, the threads and the load, and the versions of Python and packages."""
    last_minute, *_ = os.getloadavg()
    machine = {
        "processor": processor_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "bfloat16_instructions": HAS_BFLOAT16,
        "vnni": torch.cpu._is_vnni_supported(),
        "threads": torch.get_num_threads(),
        "load_average": round(last_minute, 2),
    }
    return machine | software("transformers", *packages)


def spread(values: list[float]) -> dict[str, float]:
    """Return the median, and the 20th and 80th percentile."""
    shares = torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64)
    numbers = torch.tensor(values, dtype=torch.float64)
    median, p20, p80 = numbers.quantile(shares).tolist()
    return {"median": median, "p20": p20, "p80": p80}


def _figures(plan: BenchPlan, name: str, kind: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the times and the rates of a program, with what it says about itself."""
    figures: dict[str, Any] = runs[-1] | {"name": name, "kind": kind}
    for phase in PHASES:
        figures[phase] = spread([run[phase] for run in runs])
    total = figures["total_ms"]["median"]
    after_first = statistics.median(run["total_ms"] - run["first_token_ms"] for run in runs)
    tokens = plan.batch * plan.new_tokens
    later_tokens = tokens - plan.batch
    figures["tokens_per_second"] = 1000 * tokens / total
    figures[DECODE_RATE] = 1000 * later_tokens / after_first
    return figures


def _ratio(other: dict[str, Any], ours: dict[str, Any], phase: str) -> float:
    """Return how many times as fast as ``other`` ours is, by medians."""
    return other[phase]["median"] / ours[phase]["median"]


def bench_summary(report: dict[str, Any]) -> RenderableType:
    """Return the times of all programs, their speeds, and the limit."""
    ours, *_ = report["contestants"]
    rows: list[list[Cell]] = []
    for contestant in report["contestants"]:
        name = f"{contestant['name']} {contestant['kind']}"
        if contestant["acceptance"] is not None:
            name += ", drafts"
        spans = ["{median:.0f} ({p20:.0f} to {p80:.0f})".format(**contestant[phase]) for phase in PHASES[:3]]
        rate, memory = Number(contestant["tokens_per_second"]), Number(contestant["memory_mb"], count)
        rows.append([name, *spans, rate, Number(_ratio(contestant, ours, "total_ms"), times), memory])
    heads = ("", "prefill ms", "first token ms", "total ms", "tokens/s", "ours", "MiB")
    notes = _limit_note(report)
    if ours["acceptance"] is not None:
        notes += f"\n{ours['acceptance']:.0%} of the drafted tokens were accepted"
    return Group(*printed([Part("times", "Times", _plan_in_words(report), heads, rows)]), Text(notes))


def _plan_in_words(report: dict[str, Any]) -> str:
    """Return the plan and the machine in words."""
    plan = report["plan"]
    machine = report["environment"]
    return (
        f"batch {plan['batch']}, prompt {plan['prompt_tokens']}, new {plan['new_tokens']}, medians (p20 to p80) of "
        f"{plan['repeats']} interleaved runs, {machine['threads']} threads, {machine['processor']}, "
        f"load average {machine['load_average']}."
    )


def _limit_note(report: dict[str, Any]) -> str:
    """Return the limit that memory sets, and how near to it ours is without drafts."""
    limit = report["limit"]
    by_memory = limit["by_memory"]
    mebibytes = limit["bytes_per_step"] / 2**20
    bandwidth = limit["bandwidth_gb_s"]
    share = report["share_of_limit"]["by_memory"]
    undrafted = share * by_memory
    decoding = report["environment"]["decoding"]
    memory = f"{mebibytes:.0f} MiB a step at the {bandwidth:.1f} GB/s measured are {by_memory:.1f} tokens/s"
    ours = f"without drafts ours decodes at {undrafted:.1f}, {share:.0%} of it, by {decoding}"
    return f"limit: {memory}; {ours}"
