"""Many parity reports in one table, as people compare them in a terminal."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from minigpt.measure.numerals import brief, percent, precise, times
from minigpt.report.parity_summary import outcome
from minigpt.report.reading import Reading, caution, outcome_of, readings_of

Writer = Callable[[float], str]


def reports_table(reports: Sequence[dict[str, Any]]) -> RenderableType:
    """One table with a row for each report, and why those fail that do.

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
    told = [Text(f"{r.label}: {reason.text}") for r in readings if outcome_of(r) == "FAIL" for reason in r["reasons"]]
    told += [Text(f"{r.label} is broken by {r['bisect.sites'].text}") for r in readings if list(r["bisect.sites"])]
    return Group(*map(Text, filter(None, [caution(readings)])), table, *told)


def _written(reading: Reading, path: str, written: Writer) -> str:
    x = reading[path].number
    return "-" if path not in reading else "not finite" if x is None else written(x)


def _parting(reading: Reading) -> str:
    """Whether greedy decoding parts from transformers', and at which new token."""
    parting = reading["greedy.first_divergence"]
    if not reading["greedy"]:
        return "-"
    return f"parts at {parting['token'].text}" if parting else "all agree"
