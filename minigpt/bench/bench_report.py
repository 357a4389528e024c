"""Times as medians with their spread, the speeds that follow from them, and the terminal's view of them."""

import dataclasses
import statistics
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from minigpt.bench.contestants import READ, TIMES
from minigpt.measure.stopwatch import Spread

PHASES = ("prefill_ms", "first_token_ms", "total_ms", "total_cpu_ms")
SHOWN = PHASES[:3]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """One contestant.

    Attributes:
        prefill_ms: reading the prompts once.
        first_token_ms: from the call to the first token.
        total_ms: from the call to the last token.
        total_cpu_ms: the processor time of all threads for that; a busy machine changes it least.
        tokens_per_second: new tokens of all rows, divided by ``total_ms``.
        decode_tokens_per_second: new tokens without the first of each row, divided by the time after the first.
        memory_mb: the peak of its process less that of ``import torch`` alone, with the files that it maps.
        compilations: by ``torch.compile``, in all runs.
        acceptance: the share of drafted tokens that were right; None if none were drafted.
    """

    name: str
    kind: str
    prefill_ms: Spread
    first_token_ms: Spread
    total_ms: Spread
    total_cpu_ms: Spread
    tokens_per_second: float
    decode_tokens_per_second: float
    memory_mb: float
    compilations: int
    acceptance: float | None = None

    @classmethod
    def of(
        cls, name: str, kind: str, runs: list[dict[str, float]], ends: dict[str, Any], batch: int, new: int
    ) -> "Measured":
        """Return the figures from the answers of its process."""
        times = {phase: Spread.of([run[phase] for run in runs]) for phase in PHASES}
        after_first = [run["total_ms"] - run["first_token_ms"] for run in runs]
        return cls(
            name=name,
            kind=kind,
            **times,
            tokens_per_second=1000 * batch * new / times["total_ms"].median,
            decode_tokens_per_second=1000 * batch * (new - 1) / statistics.median(after_first),
            memory_mb=ends["peak_mb"] - ends["bare_mb"],
            compilations=ends["compilations"],
            acceptance=ends["accepted"] / ends["drafted"] if ends.get("drafted") else None,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limit:
    """The most tokens a second that the machine allows, in all rows.

    Attributes:
        bandwidth_gb_s: of reading memory: sums over much more than caches hold.
        bytes_per_step: of the weights in minigpt; every step must read them once.
        by_memory: a step taking these bytes at that bandwidth.
        by_products: a step that computes its matrix products by PyTorch, and nothing else.
    """

    bandwidth_gb_s: float
    bytes_per_step: int
    by_memory: float
    by_products: float

    @classmethod
    def of(cls, products: Measured, float32_bytes: int, kind: str, batch: int) -> "Limit":
        bandwidth = READ * TIMES / (products.prefill_ms.median / 1000)  # bytes a second
        step = float32_bytes * getattr(torch, kind).itemsize // torch.float32.itemsize
        return cls(
            bandwidth_gb_s=bandwidth / 1e9,
            bytes_per_step=step,
            by_memory=batch * bandwidth / step,
            by_products=products.tokens_per_second,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchReport:
    """What was timed, on which machine, and the results; minigpt is the first of the contestants."""

    plan: dict[str, Any]
    environment: dict[str, Any]
    contestants: list[Measured]
    limit: Limit

    def ratio(self, other: Measured, phase: str = "total_ms") -> float:
        """Return how many times as fast as ``other`` minigpt is, by medians."""
        return getattr(other, phase).median / getattr(self.contestants[0], phase).median

    def to_dict(self) -> dict[str, Any]:
        """Return the report in types that JSON has."""
        ours, *others = self.contestants
        ratios = {
            f"{other.name}:{other.kind}": {phase: self.ratio(other, phase) for phase in PHASES} for other in others
        }
        shares = {
            "by_memory": ours.decode_tokens_per_second / self.limit.by_memory,
            "by_products": ours.decode_tokens_per_second / self.limit.by_products,
        }
        return dataclasses.asdict(self) | {"times_as_fast_as": ratios, "share_of_limit": shares}


def bench_summary(report: BenchReport) -> RenderableType:
    """Return the times of all contestants, their speeds, and the limit."""
    table = Table("", "prefill ms", "first token ms", "total ms", "tokens/s", "ours", "MiB",
                  box=None, pad_edge=False)  # fmt: skip
    for measured in report.contestants:
        spreads = (getattr(measured, phase) for phase in SHOWN)
        table.add_row(
            f"{measured.name} {measured.kind}",
            *(f"{spread.median:.0f} ({spread.p20:.0f} to {spread.p80:.0f})" for spread in spreads),
            f"{measured.tokens_per_second:.1f}",
            f"{report.ratio(measured):.2f} x",
            f"{measured.memory_mb:.0f}",
        )
    plan, ours, limit = report.plan, report.contestants[0], report.limit
    conditions = (
        f"batch {plan['batch']}, prompt {plan['prompt_tokens']}, new {plan['new_tokens']}, medians (p20 to p80) of "
        f"{plan['repeats']} interleaved runs, {report.environment['threads']} threads, "
        f"{report.environment['processor']}, load average {report.environment['load_average']}"
    )
    reach = (
        f"limit: {limit.bytes_per_step / 2**20:.0f} MiB a step at the {limit.bandwidth_gb_s:.1f} GB/s measured are "
        f"{limit.by_memory:.1f} tokens/s, the products alone {limit.by_products:.1f}; ours decodes at "
        f"{ours.decode_tokens_per_second:.1f}, by {report.environment['decoding']}"
    )
    said = f"{ours.acceptance:.0%} of the drafted tokens were accepted" if ours.acceptance is not None else ""
    return Group(Text(conditions), table, Text(reach), *[Text(said)] * bool(said))
