"""Parity reports as people compare them: labelled, and in one table for a terminal."""

import string
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from minigpt.errors import MiniGPTError
from minigpt.judge.report import outcome_of, perplexities
from minigpt.report.numerals import brief, percent, precise, times
from minigpt.report.parity_summary import outcome

Report = dict[str, Any]

KINDS = {
    "model": str, "norm": str, "sites": list, "device": str, "dtype": str, "attention": str, "versions": dict,
    "verdict": str, "reasons": list, "logits": dict, "distribution": dict, "greedy": dict, "norm_sites": list,
}  # fmt: skip


def labelled(reports: Sequence[Report]) -> list[Report]:
    """Return what was measured of each report, with its outcome and, if there are several, a label A, B, C.

    Raises:
        MiniGPTError: if one of them is not a parity report.
    """
    found, letters = [], string.ascii_uppercase
    for i, report in enumerate(reports):
        label = f"{letters[i % 26]}{i // 26 or ''}" if len(reports) > 1 else ""
        lacking = [
            key for key, kind in KINDS.items() if not (isinstance(report, dict) and isinstance(report.get(key), kind))
        ]
        if lacking or report["verdict"] not in ("pass", "fail"):
            raise MiniGPTError(
                f"{f'report {label}' if label else 'the report'} is not a parity report: its "
                f"{', '.join(lacking) or 'verdict'} cannot be read; write one with minigpt parity --json FILE"
            )
        measured = {name: value for name, value in report.items() if value is not None}
        heading = f"{label} · {report['norm']}" if label else ""
        found.append(measured | {"label": label, "heading": heading, "outcome": outcome_of(report)})
    return found


def conditions(reports: Sequence[Report]) -> dict[str, list[Any]]:
    """What each report was measured on: a list for each condition that one of them names."""
    names = ("model", "against", "norm", "sites", "dtype", "attention", "device", "prompts")
    facts = {name: [report.get(name) for report in reports] for name in names}
    for name in dict.fromkeys(name for report in reports for name in report["versions"]):
        facts[name.replace("_", " ")] = [report["versions"].get(name) for report in reports]
    return {name: values for name, values in facts.items() if any(values)}


def caution(reports: Sequence[Report]) -> str | None:
    """Say in what the reports were not measured alike, so that their figures cannot be compared."""
    facts = conditions(reports).items()
    names = [name for name, values in facts if values.count(values[0]) < len(values) and name not in ("norm", "sites")]
    return f"Not measured alike: the reports differ in {', '.join(names)}." if names else None


def reports_table(reports: Sequence[Report]) -> RenderableType:
    """One table with a row for each report, and why those fail that do.

    Args:
        reports: as ``ParityReport.to_dict`` returns them, or read from JSON files.

    Raises:
        MiniGPTError: if one of them is not a parity report.
    """
    reports = labelled(reports)
    figures = ("KL mean", "top-1", "perplexity", "of noise", "greedy")
    models = ("model",) if len({report["model"] for report in reports}) > 1 else ()
    table = Table("", "", *models, "norm", "sites", *figures, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for report in reports:
        found, parting = report["distribution"], report["greedy"].get("first_divergence")
        table.add_row(
            report["label"],
            outcome(report["outcome"]),
            *(Text(report[name]) for name in (*models, "norm")),
            Text(", ".join(report["sites"])),
            brief(found["kl_mean"]),
            percent(found["top1_agreement"]),
            precise(perplexities(report)[1]),
            times(report["logits"]["ratio"]),
            f"parts at {parting['token']}" if parting else "all agree",
        )
    before = {precise(perplexities(report)[0]) for report in reports}
    table.caption = f"perplexity of the original: {', '.join(sorted(before))}"
    table.caption_justify = "left"
    said = caution(reports)
    why = [f"{r['label']}: {reason}" for r in reports if r["outcome"] == "FAIL" for reason in r["reasons"]]
    broken = {r["label"]: r.get("bisect", {}).get("sites") for r in reports}
    why += [f"{label} is broken by {', '.join(sites)}" for label, sites in broken.items() if sites]
    return Group(*([Text(said)] if said else []), table, *map(Text, why))
