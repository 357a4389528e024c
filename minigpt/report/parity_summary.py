"""A parity report, or several in one table, as people read them in a terminal; and the figures of terminal and page."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from minigpt.errors import MiniGPTError
from minigpt.report.fields import Greedy, Part, Report, outcome_of, perplexities, population, unit
from minigpt.report.numerals import brief, change, count, format_limit, percent, precise, times, uncertain
from minigpt.report.parity_report import ParityReport

MOST_SITES = 5
MOST_REASONS = 6  # below the table of many reports
STYLES = {"PASS": "bold green", "FAIL": "bold red", "DIFFERENT": "bold yellow"}

FIELD_TYPES = {
    "model": str, "norm": str, "sites": list, "device": str, "dtype": str, "attention": str, "versions": dict,
    "verdict": str, "reasons": list, "logits": dict, "distribution": dict, "greedy": dict, "norm_sites": list,
}  # fmt: skip


class ReportFigure(NamedTuple):
    """A figure of a report, in the terminal and on the page.

    Attributes:
        name: what people read.
        part, key: where it stands in the report's JSON.
        form: formats it.
        beside: the key of what stands beside it: its noise floor, the truth, or its standard error ("..._se").
        in_terminal: whether the terminal has it too.
    """

    name: str
    part: str
    key: str
    form: Callable[[float | None], str] = brief
    beside: str = ""
    in_terminal: bool = True

    @property
    def has_error(self) -> bool:
        return self.beside.endswith("_se")

    def told(self, part: Part) -> str:
        """Return the figure with what stands beside it, for the terminal."""
        x, other = part[self.key], part.get(self.beside)
        if self.has_error:
            return uncertain(x, other, self.form)
        what = "truth" if self.part == "distribution" else "noise floor"
        return self.form(x) + (f" ({what} {self.form(other)})" if self.beside else "")


FIGURES = (
    ReportFigure("logits, RMS error", "logits", "rms_error", brief, "noise_floor_rms"),
    ReportFigure("logits, largest error", "logits", "max_abs_error", brief, "noise_floor_max"),
    ReportFigure("logits, error over the noise floor", "logits", "ratio", times),
    ReportFigure("the same without each position's shift", "logits", "ratio_without_shift", times, in_terminal=False),
    ReportFigure("logits, RMS of the truth", "logits", "scale"),
    ReportFigure("logits as decoded, RMS error", "decoding", "rms_error", brief, "noise_floor_rms", in_terminal=False),
    ReportFigure(
        "logits as decoded, largest error", "decoding", "max_abs_error", brief, "noise_floor_max", in_terminal=False
    ),
    ReportFigure("logits as decoded, error over the noise floor", "decoding", "ratio", times),
    ReportFigure("the same without each position's shift", "decoding", "ratio_without_shift", times, in_terminal=False),
    ReportFigure("logits as decoded, RMS of the truth", "decoding", "scale", in_terminal=False),
    ReportFigure("tokens of the distribution", "distribution", "tokens", count, in_terminal=False),
    ReportFigure("KL divergence, mean", "distribution", "kl_mean", brief, "kl_mean_se"),
    ReportFigure("KL divergence, median", "distribution", "kl_median"),
    ReportFigure("KL divergence, 90th percentile", "distribution", "kl_p90", in_terminal=False),
    ReportFigure("KL divergence, 99th percentile", "distribution", "kl_p99"),
    ReportFigure("KL divergence, 99.9th percentile", "distribution", "kl_p999"),
    ReportFigure("KL divergence, largest", "distribution", "kl_max"),
    ReportFigure("same likeliest token", "distribution", "top1_agreement", percent, "top1_agreement_se"),
    ReportFigure("five likeliest tokens in common", "distribution", "top5_agreement", percent),
    ReportFigure("change of loss, nats a token", "distribution", "loss_change", brief, "loss_change_se"),
    ReportFigure("perplexity of these tokens", "distribution", "perplexity_candidate", precise, "perplexity_reference"),
    ReportFigure("positions of the texts", "coverage", "positions", count, "context", in_terminal=False),
    ReportFigure("tokens of the texts", "coverage", "tokens", count, "vocabulary", in_terminal=False),
    ReportFigure("greedy tokens compared", "greedy", "tokens_compared", count, in_terminal=False),
    ReportFigure(
        "reference arithmetic, largest difference from transformers", "bitwise", "max_abs_error", in_terminal=False
    ),
)


def parity_summary(report: ParityReport) -> RenderableType:
    """The verdict with its reasons, the figures, and the norm sites with the largest errors."""
    norm = "LayerNorm" if report.against_norm == "fused" else f"{report.against_norm} norms"
    about = (
        f"{report.model} with {report.norm} at {', '.join(report.sites)}, against {report.against or 'itself'} with "
        f"{norm} in transformers: {report.dtype}, {report.attention}, {report.device}, {report.prompts}"
    )
    missing = (
        [f"Not judged, since the candidate does not give it: {', '.join(report.missing)}."] if report.missing else []
    )
    sentences = [*report.reasons, *report.notes, *missing, *_next_step(report)]
    figures = _table(padding=(0, 2, 0, 0))
    for name, figure in (*_removed(report), *_figures(report), *_others(report)):
        figures.add_row(Text(name), Text(figure))
    return Group(
        outcome(report.outcome, about),
        *(Padding(Text(sentence), (0, 0, 0, 2), expand=False) for sentence in sentences),
        figures,
        *_worst_sites(report),
        *_tables(report),
    )


def outcome(word: str, about: str = "") -> Text:
    """A verdict in its colour, and what it is about."""
    return Text(word, style=STYLES[word]).append(f"  {about}" if about else "", style="not bold default")


def _table(*heads: str, padding: tuple[int, int, int, int] = (0, 1, 0, 0)) -> Table:
    return Table(*heads, show_header=bool(heads), box=None, pad_edge=False, padding=padding)


def _next_step(report: ParityReport) -> Iterator[str]:
    """After FAIL, the commands that find the cause."""
    if report.outcome != "FAIL" or (report.removal is not None and report.removal.allowed is not None):
        return
    steps = []
    if report.exact and report.norm not in ("fused", "its own"):
        steps.append(f"minigpt norms --check {report.norm} names a mistake in the norm")
    if report.bisect is None and any(site.swapped for site in report.norm_sites):
        steps.append("--bisect names the sites that break it")
    if steps:
        yield f"Next: {'; '.join(steps)}."


def _removed(report: ParityReport) -> Iterator[tuple[str, str]]:
    """How many sites a budget allows, first: that is what was asked."""
    removal = report.removal
    if removal is not None and removal.allowed is not None:
        sites = ", ".join(step.site for step in removal.steps[: removal.allowed])
        limits = ", ".join(f"{line.quantity}={format_limit(line.quantity, line.limit)}" for line in report.budget or ())
        yield f"{limits} allows", f"{removal.allowed} of {len(report.norm_sites)} sites: {sites or 'none'}"


def _figures(report: ParityReport) -> Iterator[tuple[str, str]]:
    """Return the lines on how close the logits are. For a norm that is no LayerNorm the distribution comes first."""
    parts = ("logits", "decoding", "distribution")
    for part in reversed(parts) if report.outcome == "DIFFERENT" else parts:
        if part == "distribution":
            yield "next-token distribution", f"of {population(report)}, ± standard error by {unit(report)}"
        if report[part] is not None:
            yield from ((one.name, one.told(report[part])) for one in FIGURES if one.part == part and one.in_terminal)
    if (text := report.text) is not None:
        what = f"on {text.tokens:,} tokens of {text.file or 'built-in texts'}"
        yield what, f"logits' error {times(text.logits.ratio)} the noise floor"
    if (text := report.perplexity) is not None:
        before, after = precise(text.reference), precise(text.candidate)
        changed = change(text.reference, text.candidate)
        yield f"perplexity of {text.file}", f"{after} (before {before}, {changed}); {text.tokens:,} tokens"


def _others(report: ParityReport) -> Iterator[tuple[str, str]]:
    """Greedy decoding, and what was asked for."""
    worst = report.distribution.worst
    where = f"prompt {worst.window}" if unit(report) == "text" else f"window {worst.window}"
    yield (
        "largest KL divergence at",
        f"{where}, position {worst.position}" + (f": {worst.text!r}" if worst.text else ""),
    )
    yield "greedy tokens", _greedy(report.greedy)
    if report.gradients is None and "gradients" not in report.missing:
        yield "gradients", "not compared; --gradients compares them"
    reach = report.coverage
    yield (
        "texts reach",
        f"{count(reach.positions)} of {count(reach.context)} positions, {count(reach.tokens)} of "
        + (f"{count(reach.vocabulary)} tokens"),
    )
    difference = f"differs from transformers by up to {brief(report.bitwise.max_abs_error)}"
    yield "reference arithmetic", "equals transformers bit for bit" if report.bitwise.equal else difference
    if report.sensitivity is not None:
        worst = ", ".join(f"{site.site} {brief(site.rms_error)}" for site in report.sensitivity[:MOST_SITES])
        yield "most sensitive sites", worst
    if report.bisect is not None:
        what = "parity" if report.budget is None else "the budget"
        none = "no set of the swapped sites, on the texts as transformers wrote them"
        yield f"breaks {what}", ", ".join(report.bisect.sites) or none
    for line in report.budget or []:
        kept = "kept" if line.kept else "NOT kept"
        yield (
            f"budget {line.quantity}",
            f"{format_limit(line.quantity, line.measured)} of {format_limit(line.quantity, line.limit)}: {kept}",
        )


def _greedy(greedy: Greedy) -> str:
    parting, compared = greedy.first_divergence, greedy.tokens_compared
    if parting is None:
        return f"all {compared} agree"
    excuse = "within the noise" if parting.within_noise else "beyond the noise"
    return (
        f"{compared} compared; prompt {parting.prompt} parts at token {parting.token}, {excuse}: "
        f"margin {brief(parting.margin)}, noise {brief(parting.noise)}"
    )


def _worst_sites(report: ParityReport) -> Iterator[Table]:
    """The sites with the largest own error, or if that is not known, of their output; and the first that is off."""
    sites = report.norm_sites
    if not sites:
        return
    key = "local_error" if sites[0].local_error is not None else "propagated_error"
    table = _table("norm site", "own error", "propagated error", "transformers' own", "swapped")
    worst = sorted(sites, key=lambda site: -site[key])[:MOST_SITES]
    off = report.first_off and report.first_off.place
    for site in [*worst, *(site for site in sites if site.site == off and site not in worst)]:
        own = "not given" if site.local_error is None else brief(site.local_error)
        errors = (own, brief(site.propagated_error), brief(site.noise))
        table.add_row(site.site, *errors, "yes" if site.swapped else "no")
    if len(sites) > MOST_SITES:
        table.caption = (
            f"the {MOST_SITES} with the largest {key.replace('local', 'own').replace('_', ' ')}, of {len(sites)}"
        )
        table.caption_justify = "left"
    yield table


def _tables(report: ParityReport) -> Iterator[RenderableType]:
    """Tables of what was asked for: gradients, what sites explain, the order in which they are swapped."""
    if report.gradients is not None:
        table = _table("gradient of", "relative error", "transformers' own", "ratio")
        for row in report.gradients[:MOST_SITES]:
            table.add_row(row.parameter, brief(row.relative_error), brief(row.noise), brief(row.ratio))
        table.caption, table.caption_justify = f"the {MOST_SITES} largest ratios, of {len(report.gradients)}", "left"
        yield table
    if report.fit is not None:
        table = _table("norm site", "explains", "fitted")
        for site in sorted(report.fit, key=lambda site: site.after):
            table.add_row(site.site, percent(site.before), percent(site.after))
        yield table
    if (removal := report.removal) is not None:
        yield Text(
            f"The least harmful site is swapped first; figures are of {removal.tokens:,} tokens, ± by {unit(report)}:"
        )
        table = _table("sites swapped", "the last", "KL divergence", "loss", "change of loss")
        table.add_row("0", "", "0", precise(removal.loss), "0")
        for number, step in enumerate(removal.steps, 1):
            kl = uncertain(step.kl_mean, step.kl_mean_se)
            table.add_row(
                str(number), step.site, kl, precise(step.loss), uncertain(step.loss_change, step.loss_change_se)
            )
        yield table


def checked(reports: Sequence[Report]) -> list[Report]:
    """Return what was measured of each report, with its outcome.

    Raises:
        MiniGPTError: if one of them is not a parity report.
    """
    measured = []
    for number, report in enumerate(reports, 1):
        fields = report if isinstance(report, dict) else {}
        lacking = [key for key, kind in FIELD_TYPES.items() if not isinstance(fields.get(key), kind)]
        if lacking or report["verdict"] not in ("pass", "fail"):
            raise MiniGPTError(
                f"{f'report {number}' if len(reports) > 1 else 'the report'} is not a parity report: its "
                f"{', '.join(lacking) or 'verdict'} cannot be read; write one with minigpt parity --json FILE"
            )
        parts = {name: value for name, value in report.items() if value is not None}
        measured.append(parts | {"outcome": outcome_of(report)})
    return measured


def conditions(report: Report) -> dict[str, Any]:
    """Return on what a report was measured, by name."""
    names = ("model", "against", "norm", "sites", "dtype", "attention", "device", "prompts")
    facts = {name: report.get(name) for name in names}
    facts |= {name.replace("_", " "): version for name, version in report["versions"].items()}
    return {name: fact for name, fact in facts.items() if fact}


def reports_table(reports: Sequence[Report]) -> RenderableType:
    """One table with a row for each report, and the first reason of those that fail.

    Args:
        reports: as ``ParityReport.to_dict`` returns them, or read from JSON files.

    Raises:
        MiniGPTError: if one of them is not a parity report.
    """
    reports = checked(reports)
    figures = ("KL mean", "top-1", "perplexity", "of noise", "greedy")
    models = ("model",) if len({report["model"] for report in reports}) > 1 else ()
    table = Table("", *models, "norm", "sites", *figures, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for report in reports:
        measured, parting = report["distribution"], report["greedy"].get("first_divergence")
        table.add_row(
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
    why = [f"{_pair(report)}: {report['reasons'][0]}" for report in reports if report["outcome"] == "FAIL"]
    broken = ((_pair(report), report.get("bisect", {}).get("sites")) for report in reports)
    why += [f"{pair} is broken by {', '.join(sites)}" for pair, sites in broken if sites]
    more = [f"and {len(why) - MOST_REASONS} more"] if len(why) > MOST_REASONS else []
    return Group(table, *map(Text, [*why[:MOST_REASONS], *more]))


def _pair(report: Report) -> str:
    return f"{report['norm']} at {', '.join(report['sites'])}"
