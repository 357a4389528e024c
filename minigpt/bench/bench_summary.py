"""The report of ``minigpt bench generate`` for a terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from minigpt.bench.bench_report import PHASES, BenchReport

SHOWN = PHASES[:3]


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
