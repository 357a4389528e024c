"""The parts of several parity reports: a table of verdicts, and what a reader needs beside it."""

from collections.abc import Sequence

from minigpt.report.fields import ParityFields, perplexities, population, text_file
from minigpt.report.numerals import percent, precise, times
from minigpt.report.parts import HEADINGS, Cell, Number, Part, about_built_in, cell, has_norm, pair

MOST_REASONS = 6  # below the table of many reports


def tables_of(reports: Sequence[ParityFields]) -> list[Part]:
    """Return a table with a row for each report: a table for each text that they were measured on."""
    tables: dict[str, list[ParityFields]] = {}
    for report in reports:
        tables.setdefault(population(report), []).append(report)
    return [_overview(f"reports-{i}", tokens, members) for i, (tokens, members) in enumerate(tables.items(), 1)]


def _overview(name: str, tokens: str, reports: Sequence[ParityFields]) -> Part:
    models, rows = models_of(reports), [_verdict_row(report) for report in reports]
    of_model = f"{models[0]}, on" if len(models) == 1 else "On"
    if len(models) == 1:
        rows = [{head: cell for head, cell in row.items() if head != "model"} for row in rows]
    before = ", ".join(sorted({precise(perplexities(report)[0]) for report in reports}))
    about = (
        f"{of_model} {tokens}. The original's perplexity is {before}; another one, also a lower one, is another "
        "model's."
    )
    return Part(name, "All verdicts", about, [*rows[0]], [[*row.values()] for row in rows])


def models_of(reports: Sequence[ParityFields]) -> list[str]:
    """Return the models of reports, each once."""
    return list(dict.fromkeys(report.model for report in reports))


def outcomes_of(reports: Sequence[ParityFields]) -> str:
    """Count the verdicts: "3 PASS, 1 FAIL"."""
    counts = dict.fromkeys(HEADINGS, 0)
    for report in reports:
        counts[report.outcome] += 1
    return ", ".join(f"{number} {outcome}" for outcome, number in counts.items() if number)


def _verdict_row(report: ParityFields) -> dict[str, Cell]:
    """Return the cells of a report by their heads."""
    of_prompts = text_file(report) is None
    parting = report.greedy.first_divergence
    sites = ", ".join(report.sites) if has_norm(report) else ""
    row = {
        "verdict": report.outcome, "model": report.model, "norm": report.norm,
        "sites": sites, "KL mean": cell(report.distribution, "kl_mean"),
        "top-1": cell(report.distribution, "top1_agreement", percent),
        "perplexity": Number(perplexities(report)[1], precise),
        "of noise": Number(_ratio(report), times),
    }  # fmt: skip
    return row | ({"greedy": f"parts at {parting.token}" if parting else "all agree"} if of_prompts else {})


def _ratio(report: ParityFields) -> float:
    """Return the error over the noise floor, of the text file if there is one."""
    if report.text is None or text_file(report) is None:
        return report.logits.ratio
    return report.text.logits.ratio


def notes_on(reports: Sequence[ParityFields]) -> list[str]:
    """Return what a table of reports needs beside it: notes, the first reason of each FAIL, the sites that break it."""
    texts, lines = [], []
    for report in reports:
        if not texts and report.built_in and text_file(report) is None:
            texts.append(about_built_in(report))
        if report.outcome == "FAIL":
            lines.append(f"{pair(report)}: {report.reasons[0]}")
    for report in reports:
        if report.bisect is not None and report.bisect.sites:
            lines.append(f"{pair(report)} is broken by {', '.join(report.bisect.sites)}")
    left_out = len(lines) - MOST_REASONS
    if left_out > 0:
        lines = [*lines[:MOST_REASONS], f"and {left_out} more"]
    return texts + lines
