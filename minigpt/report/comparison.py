"""Two parity reports as a person compares them in a terminal."""

from collections.abc import Callable
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from minigpt.report.numerals import brief, percent, precise, times
from minigpt.report.parity_summary import verdict
from minigpt.report.reading import Reading, caution, readings_of


def comparison_summary(a: dict[str, Any], b: dict[str, Any]) -> RenderableType:
    """Both verdicts and the figures of two reports side by side, and in what they were not measured alike.

    Args:
        a, b: as ``ParityReport.to_dict`` makes them, or read from JSON files. What neither has is left out.

    Raises:
        MiniGPTError: one of them is no parity report.
    """
    readings = readings_of([a, b])
    return Group(_verdicts(*readings), *map(Text, filter(None, [caution(readings)])), _figures(*readings))


def _verdicts(*readings: Reading) -> Text:
    lines = []
    for reading in readings:
        about = f"{reading['model'].text} with {reading['norm'].text}: {reading['dtype'].text}"
        said = verdict(reading["verdict"].value == "pass", about)
        lines += [
            Text.assemble(f"{reading.label}  ", said),
            *(Text(f"   {reason.text}") for reason in reading["reasons"]),
        ]
    return Text("\n").join(lines)


def _figures(a: Reading, b: Reading) -> Table:
    heads = [Column(Text(f"{reading.label}: {reading['norm'].text}")) for reading in (a, b)]
    table = Table("", *heads, "B over A", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, path, written in (
        ("logits' RMS error", "logits.rms_error", brief),
        ("times the noise floor", "logits.ratio", brief),
        ("times the noise floor, as decoded", "decoding.ratio", brief),
        ("largest error", "logits.max_abs_error", brief),
        ("KL divergence, mean", "distribution.kl_mean", brief),
        ("KL divergence, largest", "distribution.kl_max", brief),
        ("same likeliest token", "distribution.top1_agreement", percent),
        ("perplexity", "distribution.perplexity_candidate", precise),
        ("perplexity of the file", "perplexity.candidate", precise),
        ("one forward, ms", "speed.candidate_ms", brief),
        ("norms' share of prefill", "cost.prefill_norm_share", percent),
    ):
        if path in a or path in b:
            table.add_row(name, *(_written(reading, path, written) for reading in (a, b)), _over(b[path], a[path]))
    table.add_row("greedy decoding", _greedy(a), _greedy(b))
    return table


def _written(reading: Reading, path: str, written: Callable[[float], str]) -> str:
    x = reading[path].number
    return "-" if path not in reading else "not finite" if x is None else written(x)


def _over(b: Reading, a: Reading) -> str:
    return times(b.number / a.number) if a.number and b.number is not None else ""


def _greedy(reading: Reading) -> str:
    parting = reading["greedy.first_divergence"]
    if not reading["greedy"]:
        return "-"
    if not parting:
        return f"all {reading['greedy.tokens_compared'].text} agree"
    return f"parts at token {parting['token'].text} of prompt {parting['prompt'].text}"
