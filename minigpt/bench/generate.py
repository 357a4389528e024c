"""Time decoding beside transformers, on one checkpoint and the same prompts, in turns, each in a separate process.

B rows, T tokens of the longest prompt.
"""

import dataclasses
import pkgutil
import statistics
import tempfile
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from minigpt.bench import contestant
from minigpt.checkpoint import save_pretrained
from minigpt.config import GPT2Config
from minigpt.device import Progress, Steps, environment, in_turns, settle_memory
from minigpt.engine.int8 import Int8Linear
from minigpt.engine.kernel import path_of
from minigpt.engine.parts import head_rows
from minigpt.errors import ConfigError
from minigpt.generation.batch import Batch
from minigpt.generation.decode import rows_of, write_rows
from minigpt.generation.settings import parse_settings
from minigpt.model import GPT2
from minigpt.model.masking import left_padded
from minigpt.recipe import from_pretrained

CONTESTANTS = {  # the classes by their names; scripts/bench/others.py adds more
    "minigpt": "minigpt.bench.generate:Minigpt",
    "undrafted": "minigpt.bench.generate:Minigpt",
    "transformers": "minigpt.bench.generate:Transformers",
    "memory": "minigpt.bench.generate:Memory",
}
PHASES = ("prefill_ms", "first_token_ms", "total_ms", "total_cpu_ms")


class Minigpt:
    """This project in a dtype or in "int8"."""

    takes = ("draft",)

    def __init__(self, folder: str, prompts: list[list[int]], kind: str, draft: str | None = None) -> None:
        self.model, self.prompts, self.draft = bench_model(folder, kind), prompts, draft
        self.drafted = self.accepted = 0
        self.decoding = path_of(self.model)

    @property
    def acceptance(self) -> float | None:
        """The share of drafted tokens that were accepted."""
        return self.accepted / self.drafted if self.drafted else None

    @torch.inference_mode()
    def prefill(self) -> Tensor:
        settings = parse_settings(max_new_tokens=1, draft=None)
        batch = Batch(self.model, len(self.prompts), max(map(len, self.prompts)))
        batch.join(rows_of(self.model, self.prompts, settings))
        return batch.logits

    def generate(self, new: int) -> int:
        settings = parse_settings(max_new_tokens=new, eos_token_id=None, draft=self.draft)
        rows = rows_of(self.model, self.prompts, settings)
        for _ in write_rows(self.model, rows, settings, len(rows)):
            pass
        self.drafted += sum(row.drafted for row in rows)
        self.accepted += sum(row.accepted for row in rows)
        return sum(len(row.new_ids) for row in rows)


class Transformers:
    """Hugging Face transformers with sdpa attention and its default cache. It has no int8 on the CPU."""

    kinds: ClassVar = {"int8": "float32"}

    def __init__(self, folder: str, prompts: list[list[int]], kind: str) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=kind, attn_implementation="sdpa")
        self.model = model.eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0
        self.ids, self.mask = left_padded(prompts)

    @torch.inference_mode()
    def prefill(self) -> Tensor:
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
        return self.model(self.ids, attention_mask=self.mask, position_ids=positions, logits_to_keep=1).logits

    def generate(self, new: int) -> int:
        out = self.model.generate(self.ids, attention_mask=self.mask, max_new_tokens=new, do_sample=False)
        return out[:, self.ids.shape[1] :].numel()


class Memory:
    """The limit: for each token it reads as many bytes as a step reads of weights, and computes nothing."""

    def __init__(self, folder: str, prompts: list[list[int]], kind: str) -> None:
        model, self.rows = bench_model(folder, kind), len(prompts)
        self.step_bytes = weight_bytes(model)
        self.memory = torch.ones(self.step_bytes // 4)

    def prefill(self) -> Tensor:
        return self.memory.sum()

    def generate(self, new: int) -> int:
        for _ in range(new):
            self.memory.sum()
        return new * self.rows


def _class_of(name: str) -> type[Any]:
    return pkgutil.resolve_name(CONTESTANTS[name])


def bench_model(folder: str, kind: str) -> GPT2:
    """Return the model as the command line opens it."""
    settle_memory()
    how: dict[str, Any] = {"quantize": "int8"} if kind == "int8" else {"dtype": kind}
    return from_pretrained(folder, device="cpu", **how)


def weight_bytes(model: GPT2) -> int:
    """Return the bytes of the weights that every new token reads: all matrices with the head, without embeddings."""
    panels = sum(part.panels.nbytes for part in model.modules() if isinstance(part, Int8Linear))
    head = 0 if model.quantize else head_rows(model).nbytes
    return panels + head + sum(p.nbytes for part in (model.h, model.ln_f) for p in part.parameters())


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """What is timed.

    Attributes:
        model: a checkpoint, as ``from_pretrained`` takes it; None for random weights of the shape of ``preset``.
        preset: as ``GPT2Config.preset`` takes it.
        kind: "float32", "bfloat16", "float16", "float64" or "int8", what ours computes in.
        against: other contestants, each NAME or NAME:KIND, for example "transformers:float32".
        batch: rows; more than one are ragged, from half of ``prompt_tokens`` to all of them.
        new_tokens: of each row, 2 or more.
        draft: as in ``generate``. For one text, ours without drafts is a contestant too, named "undrafted".

    Raises:
        ConfigError: if a contestant is unknown.
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
            if name not in CONTESTANTS:
                raise ConfigError(f"must be transformers, got {name!r}", argument="against")

    @property
    def contestants(self) -> list[tuple[str, str]]:
        """(name, kind) of all, ours first; an entry without a kind has ours, as that program names it."""
        entries = [entry.partition(":") for entry in self.against]
        is_drafted = self.draft is not None and self.batch == 1 and self.kind != "int8"
        ours = [("minigpt", self.kind)] + [("undrafted", self.kind)] * is_drafted
        known = {name: getattr(_class_of(name), "kinds", {}).get(self.kind, self.kind) for name, _, _ in entries}
        return ours + [(name, kind or known[name]) for name, _, kind in entries]

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """Return random ids, the same for all contestants."""
        shortest = self.prompt_tokens if self.batch == 1 else max(1, self.prompt_tokens // 2)
        lengths = torch.linspace(shortest, self.prompt_tokens, self.batch).round().int().tolist()
        generator = torch.Generator().manual_seed(0)
        return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]


def bench_generate(plan: BenchPlan, progress: Progress | None = None) -> dict[str, Any]:
    """Time every contestant and the limit ``plan.repeats`` times, in turns; return the report as JSON's own types.

    ``contestants`` has ours first. The memory of one is the peak of its process less that of ``import torch`` alone,
    with the files that it maps. Its ``total_cpu_ms``, the processor time of all threads, changes least on a busy
    machine. ``tokens_per_second`` counts the whole call, ``decode_tokens_per_second`` the tokens after the first.
    ``share_of_limit`` is of ours without drafts, which reads every weight for each token.

    Raises:
        CheckpointError, ConfigError: if the model cannot be loaded, or its context is too short.
        MiniGPTError: if a contestant failed.
    """
    plans = [("memory", plan.kind), *plan.contestants]
    begin = Steps(progress, total=1 + len(plans) + plan.repeats)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as processes:
        begin("preparing the checkpoint")
        prompts, asks = plan.prompts(_prepared(plan, folder).vocab_size), {}
        room = plan.prompt_tokens + plan.new_tokens
        for name, kind in plans:
            begin(f"loading {name} at {kind}")
            options = {"draft": plan.draft if name == "minigpt" else None, "room": room}
            taken = {option: options[option] for option in getattr(_class_of(name), "takes", ())}
            process = contestant(CONTESTANTS[name], plan.new_tokens, folder=folder, prompts=prompts, kind=kind, **taken)
            asks[name, kind] = processes.enter_context(process)
        rounds = (begin(f"round {number + 1} of {plan.repeats}") for number in range(plan.repeats))
        runs = in_turns({who: lambda ask=ask: ask("run") for who, ask in asks.items()}, rounds)
        ends = {who: ask("describe") for who, ask in asks.items()}
    memory, ours, *others = (_figures(plan, *who, runs[who], ends[who]) for who in plans)
    step, limit = memory["step_bytes"], memory["decode_tokens_per_second"]
    undrafted = next((other for other in others if other["name"] == "undrafted"), ours)
    return {
        "plan": dataclasses.asdict(plan),
        "environment": environment(torch.get_num_threads()) | {"decoding": ours["decoding"]},
        "contestants": [ours, *others],
        "limit": {"bandwidth_gb_s": limit / plan.batch * step / 1e9, "bytes_per_step": step, "by_memory": limit},
        "times_as_fast_as": {
            f"{other['name']}:{other['kind']}": {phase: _ratio(other, ours, phase) for phase in PHASES}
            for other in others
        },
        "share_of_limit": {"by_memory": undrafted["decode_tokens_per_second"] / limit},
    }


def _prepared(plan: BenchPlan, folder: str) -> GPT2Config:
    """Write the model to ``folder`` as a float32 checkpoint that all contestants can load; return its config."""
    torch.manual_seed(0)
    model = (
        GPT2(GPT2Config.preset(plan.preset)) if plan.model is None
        else from_pretrained(plan.model, device="cpu", dtype="float32")
    )  # fmt: skip
    if plan.prompt_tokens + plan.new_tokens > model.config.n_positions:
        raise ConfigError(
            f"{plan.prompt_tokens} prompt tokens and {plan.new_tokens} new ones exceed the model's context of "
            f"{model.config.n_positions}"
        )
    save_pretrained(model, folder)
    return model.config


def spread(values: list[float]) -> dict[str, float]:
    """Return the median, and the 20th and 80th percentile."""
    shares = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64))
    return dict(zip(("median", "p20", "p80"), shares.tolist(), strict=True))


def _figures(
    plan: BenchPlan, name: str, kind: str, runs: list[dict[str, float]], end: dict[str, Any]
) -> dict[str, Any]:
    times = {phase: spread([run[phase] for run in runs]) for phase in PHASES}
    after_first = statistics.median(run["total_ms"] - run["first_token_ms"] for run in runs)
    return {
        "name": name,
        "kind": kind,
        **times,
        "tokens_per_second": 1000 * plan.batch * plan.new_tokens / times["total_ms"]["median"],
        "decode_tokens_per_second": 1000 * plan.batch * (plan.new_tokens - 1) / after_first,
        **end,
    }


def _ratio(other: dict[str, Any], ours: dict[str, Any], phase: str) -> float:
    """Return how many times as fast as ``other`` ours is, by medians."""
    return other[phase]["median"] / ours[phase]["median"]


def bench_summary(report: dict[str, Any]) -> RenderableType:
    """Return the times of all contestants, their speeds, and the limit."""
    plan, machine, limit, ours = report["plan"], report["environment"], report["limit"], report["contestants"][0]
    share = report["share_of_limit"]["by_memory"]
    table = Table("", "prefill ms", "first token ms", "total ms", "tokens/s", "ours", "MiB",
                  box=None, pad_edge=False)  # fmt: skip
    for one in report["contestants"]:
        table.add_row(
            f"{one['name']} {one['kind']}{', drafts' if one['acceptance'] is not None else ''}",
            *("{median:.0f} ({p20:.0f} to {p80:.0f})".format(**one[phase]) for phase in PHASES[:3]),
            f"{one['tokens_per_second']:.1f}",
            f"{_ratio(one, ours, 'total_ms'):.2f} x",
            f"{one['memory_mb']:.0f}",
        )
    notes = [
        f"batch {plan['batch']}, prompt {plan['prompt_tokens']}, new {plan['new_tokens']}, medians (p20 to p80) of "
        f"{plan['repeats']} interleaved runs, {machine['threads']} threads, {machine['processor']}, "
        f"load average {machine['load_average']}",
        f"limit: {limit['bytes_per_step'] / 2**20:.0f} MiB a step at the {limit['bandwidth_gb_s']:.1f} GB/s measured "
        f"are {limit['by_memory']:.1f} tokens/s; without drafts ours decodes at {share * limit['by_memory']:.1f}, "
        f"{share:.0%} of it, by {machine['decoding']}",
    ]
    if ours["acceptance"] is not None:
        notes.append(f"{ours['acceptance']:.0%} of the drafted tokens were accepted")
    return Group(Text(notes[0]), table, *map(Text, notes[1:]))
