"""Many parity reports in one table, and two of them figure by figure, as people compare them in a terminal."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from minigpt.measure.numerals import brief, percent, precise, times
from minigpt.report.parity_summary import outcome
from minigpt.report.reading import Reading, caution, outcome_of, readings_of

Writer = Callable[[float], str]


def reports_table(reports: Sequence[dict[str, Any]]) -> RenderableType:
    """One table with a row for each report.

    Args:
        reports: as ``ParityReport.to_dict`` returns them, or read from JSON files.

    Raises:
        MiniGPTError: if one of them is not a parity report.
    """
    readings = readings_of(reports)
    figures = ("KL mean", "top-1", "perplexity", "of noise", "greedy")
    models = ("model",) if len({reading["model"].text for reading in readings}) > 1 else ()
    names = (*models, "norm", "sites")
    table = Table("", "", *names, *figures, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for reading in readings:
        in_file = "perplexity.candidate" if reading["perplexity"] else "distribution.perplexity_candidate"
        table.add_row(
            reading.label,
            outcome(outcome_of(reading)),
            *(Text(reading[name].text) for name in names),
            _written(reading, "distribution.kl_mean", brief),
            _written(reading, "distribution.top1_agreement", percent),
            _written(reading, in_file, precise),
            _written(reading, "logits.ratio", times),
            _parting(reading),
        )
    before = {_written(r, "distribution.perplexity_reference", precise) for r in readings if not r["perplexity"]}
    before |= {_written(r, "perplexity.reference", precise) for r in readings if r["perplexity"]}
    table.caption = f"perplexity of the original: {', '.join(sorted(before))}"
    table.caption_justify = "left"
    culprits = [
        Text(f"{reading.label} is broken by {reading['bisect.sites'].text}")
        for reading in readings
        if list(reading["bisect.sites"])
    ]
    return Group(*map(Text, filter(None, [caution(readings)])), table, *culprits)


def comparison_summary(reports: Sequence[dict[str, Any]]) -> RenderableType:
    """The table of all reports, the reasons of those that fail, and the figures of two reports side by side.

    Raises:
        MiniGPTError: if one of them is not a parity report.
    """
    readings, parts = readings_of(reports), [reports_table(reports)]
    for reading in readings:
        if len(readings) == 2 or outcome_of(reading) == "FAIL":
            parts += [Text(f"{reading.label}: {reason.text}") for reason in reading["reasons"]]
    return Group(*parts, *([_figures(*readings)] if len(readings) == 2 else []))


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


def _written(reading: Reading, path: str, written: Writer) -> str:
    x = reading[path].number
    return "-" if path not in reading else "not finite" if x is None else written(x)


def _over(b: Reading, a: Reading) -> str:
    return times(b.number / a.number) if a.number and b.number is not None else ""


def _parting(reading: Reading) -> str:
    """As ``_greedy``, for a narrow column."""
    parting = reading["greedy.first_divergence"]
    if not reading["greedy"]:
        return "-"
    return f"parts at {parting['token'].text}" if parting else "all agree"


def _greedy(reading: Reading) -> str:
    parting = reading["greedy.first_divergence"]
    if not reading["greedy"]:
        return "-"
    if not parting:
        return f"all {reading['greedy.tokens_compared'].text} agree"
    return f"parts at token {parting['token'].text} of prompt {parting['prompt'].text}"
