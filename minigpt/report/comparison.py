"""Parity reports as people compare them: labelled, and in one table for a terminal."""

import string
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from minigpt.errors import MiniGPTError
from minigpt.report.numerals import percent, precise, times, uncertain
from minigpt.report.parity_report import outcome_of, perplexities, population
from minigpt.report.parity_summary import outcome

Report = dict[str, Any]

MOST_REASONS = 6  # below the table of many reports

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
    """One table with a row for each report, and the first reason of those that fail.

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
        measured, parting = report["distribution"], report["greedy"].get("first_divergence")
        table.add_row(
            report["label"],
            outcome(report["outcome"]),
            *(Text(report[name]) for name in (*models, "norm")),
            Text(", ".join(report["sites"])),
            uncertain(measured["kl_mean"], measured.get("kl_mean_se")),
            uncertain(measured["top1_agreement"], measured.get("top1_agreement_se"), percent),
            precise(perplexities(report)[1]),
            times(report["logits"]["ratio"]),
            f"parts at {parting['token']}" if parting else "all agree",
        )
    before = {precise(perplexities(report)[0]) for report in reports}
    texts = {report["perplexity"]["file"] if "perplexity" in report else "the prompts" for report in reports}
    kls = {population(report) for report in reports}
    table.caption = (
        f"KL and top-1 of {' and '.join(sorted(kls))}; perplexity of {' and '.join(sorted(texts))}, of the original: "
        f"{', '.join(sorted(before))}"
    )
    table.caption_justify = "left"
    differing = caution(reports)
    why = [f"{r['label']}: {r['reasons'][0]}" for r in reports if r["outcome"] == "FAIL" and r["reasons"]]
    broken = {r["label"]: r.get("bisect", {}).get("sites") for r in reports}
    why += [f"{label} is broken by {', '.join(sites)}" for label, sites in broken.items() if sites]
    more = f"and {len(why) - MOST_REASONS} more" if len(why) > MOST_REASONS else ""
    return Group(
        *([Text(differing)] if differing else []), table, *map(Text, [*why[:MOST_REASONS], *([more] * bool(more))])
    )
