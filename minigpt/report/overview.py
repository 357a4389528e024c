"""Several parity reports in a table, with what a reader needs with it."""

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Group, RenderableType
from rich.text import Text

from minigpt.report.fields import ReportFields, has_norm, perplexities, population, text_file
from minigpt.report.numerals import percent, precise, times
from minigpt.report.part import Cell, Number, Part, cell
from minigpt.report.sentences import ABOUT_BUILT_IN, BY_PARITY, pair
from minigpt.report.terminal import printed

MOST_REASONS = 6  # below the table of many reports


def tables_of(reports: Sequence[ReportFields]) -> list[Part]:
    """Return a table with a row for each report: a table for each text that they were measured on."""
    tables: dict[str, list[ReportFields]] = {}
    for report in reports:
        tables.setdefault(population(report), []).append(report)
    overviews = []
    for number, (tokens, members) in enumerate(tables.items(), 1):
        overviews.append(_overview(f"reports-{number}", tokens, members))
    return overviews


def _overview(name: str, tokens: str, reports: Sequence[ReportFields]) -> Part:
    models = models_of(reports)
    is_one_model = len(models) == 1
    rows = []
    originals = set()
    for report in reports:
        row = _verdict_row(report)
        if is_one_model:
            del row["model"]
        rows.append(row)
        original, _ = perplexities(report)
        originals.add(precise(original))
    measured = f"{models[0]}, on {tokens}" if is_one_model else f"On {tokens}"
    before = ", ".join(sorted(originals))
    about = f"{measured}. The original's perplexity is {before}; a higher or a lower one is a different model's."
    heads = list(rows[0])
    return Part(name, "All verdicts", about, heads, [list(row.values()) for row in rows])


def csv_of(reports: Sequence[ReportFields]) -> str:
    """Return a line of CSV for each report. The figures have the names that the JSON gives them, and a study's CSV."""
    lines = []
    for report in reports:
        line: dict[str, object] = {}
        for name in ("model", "norm", "sites", "dtype", "verdict", "outcome"):
            line[name] = getattr(report, name)
        line["sites"] = ",".join(report.sites)
        line["ratio"] = _noise_ratio(report)
        line |= asdict(report.distribution)
        del line["worst"]
        lines.append(line)
    table = io.StringIO()
    writer = csv.DictWriter(table, lines[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return table.getvalue()


def models_of(reports: Sequence[ReportFields]) -> list[str]:
    """Return the models of reports, each once."""
    models = dict.fromkeys(report.model for report in reports)
    return list(models)


def outcomes_of(reports: Sequence[ReportFields]) -> str:
    """Count the verdicts: "3 PASS, 1 FAIL"."""
    counts = dict.fromkeys(BY_PARITY, 0)
    for report in reports:
        counts[report.outcome] += 1
    return ", ".join(f"{number} {outcome}" for outcome, number in counts.items() if number)


def _verdict_row(report: ReportFields) -> dict[str, Cell]:
    """Return the cells of a report by their heads."""
    row: dict[str, Cell] = {"verdict": report.outcome, "model": report.model, "norm": report.norm, "sites": ""}
    if has_norm(report):
        row["sites"] = ", ".join(report.sites)
    row["KL mean"] = cell(report.distribution, "kl_mean")
    row["top-1"] = cell(report.distribution, "top1_agreement", percent)
    _, perplexity = perplexities(report)
    row["perplexity"] = Number(perplexity, precise)
    row["of noise"] = Number(_noise_ratio(report), times)
    if text_file(report) is None:
        parting = report.greedy.first_divergence
        row["greedy"] = "all agree" if parting is None else f"differs at {parting.token}"
    return row


def _noise_ratio(report: ReportFields) -> float:
    """Return the error over the noise floor, of the text file if there is one."""
    if report.text is None or text_file(report) is None:
        return report.logits.ratio
    return report.text.logits.ratio


def notes_on(reports: Sequence[ReportFields]) -> list[str]:
    """Return what goes with a table of reports: notes, the first reason of each FAIL, and the sites that break it."""
    texts = []
    lines = []
    for report in reports:
        is_first = not texts
        if is_first and report.built_in and text_file(report) is None:
            texts.append(ABOUT_BUILT_IN)
        if report.outcome == "FAIL":
            lines.append(f"{pair(report)}: {report.reasons[0]}")
    for report in reports:
        if report.bisect is not None and report.bisect.sites:
            sites = ", ".join(report.bisect.sites)
            lines.append(f"{pair(report)} is broken by {sites}")
    left_out = len(lines) - MOST_REASONS
    if left_out > 0:
        lines = [*lines[:MOST_REASONS], f"and {left_out} more"]
    return texts + lines


def reports_table(reports: Sequence[ReportFields]) -> RenderableType:
    """Return one table with a row for each report, and the first reason of those that fail."""
    tables = printed(tables_of(reports))
    notes = map(Text, notes_on(reports))
    return Group(*tables, *notes)
