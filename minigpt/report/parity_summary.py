"""A parity report as people read it in a terminal."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from minigpt.judge.report import Fields, ParityReport
from minigpt.report.numerals import brief, is_finite, percent, precise

MOST_SITES = 5
STYLES = {"PASS": "bold green", "FAIL": "bold red", "DIFFERENT": "bold yellow"}


def parity_summary(report: ParityReport) -> RenderableType:
    """The verdict with its reasons, the figures, and the norm sites with the largest errors."""
    against = f" against {report.against}" if report.against else ""
    about = (
        f"{report.model}{against} with {report.norm} at {', '.join(report.sites)}: {report.dtype}, {report.attention}, "
        f"{report.device}, {report.prompts}"
    )
    sentences = [*report.reasons, *report.notes, *_next_step(report)]
    figures = _table(padding=(0, 2, 0, 0))
    closeness = [*_logits(report), *_distribution(report)]
    if report.outcome == "DIFFERENT":
        closeness = [*_distribution(report), *_logits(report)]
    for name, figure in (*closeness, *_others(report)):
        figures.add_row(name, figure)
    return Group(
        outcome(report.outcome, about),
        *(Padding(Text(sentence), (0, 0, 0, 2), expand=False) for sentence in sentences),
        figures,
        _worst_sites(report.norm_sites),
        *_fit_and_removal(report),
    )


def outcome(word: str, about: str = "") -> Text:
    """A verdict in its colour, and what it is about."""
    return Text(word, style=STYLES[word]).append(f"  {about}" if about else "", style="not bold default")


def _table(*heads: str, padding: tuple[int, int, int, int] = (0, 1, 0, 0)) -> Table:
    return Table(*heads, show_header=bool(heads), box=None, pad_edge=False, padding=padding)


def _next_step(report: ParityReport) -> Iterator[str]:
    """After FAIL, the commands that find the cause."""
    steps = []
    if report.exact and report.norm != "fused":
        steps.append(f"minigpt norms --check {report.norm} names a mistake in the norm")
    if report.bisect is None:
        steps.append("--bisect names the sites that break it")
    if steps and report.outcome == "FAIL":
        yield f"Next: {'; '.join(steps)}."


def _distribution(report: ParityReport) -> Iterator[tuple[str, str]]:
    found = report.distribution
    yield (
        "KL divergence",
        f"mean {brief(found.kl_mean)}, median {brief(found.kl_median)}, 99.9th percentile {brief(found.kl_p999)}, "
        f"largest {brief(found.kl_max)} nats",
    )
    if not is_finite(found.perplexity_reference):
        yield "perplexity", "nothing to predict: no prompt has two tokens"
    else:
        of_what = f", of the {report.prompts}; --text FILE measures others" if "built-in" in report.prompts else ""
        figures = f"{precise(found.perplexity_candidate)} (truth {precise(found.perplexity_reference)})"
        yield "perplexity", figures + of_what
    yield (
        "likeliest tokens",
        f"same first {percent(found.top1_agreement)}, five in common {percent(found.top5_agreement)}",
    )


def _logits(report: ParityReport) -> Iterator[tuple[str, str]]:
    logits = report.logits
    yield (
        "logits' RMS error",
        f"{brief(logits.rms_error)}, {brief(logits.ratio)} times the noise floor of {brief(logits.noise_floor_rms)}, "
        f"on logits of scale {brief(logits.scale)}",
    )
    if (decoding := report.decoding) is not None:
        floor = f"the noise floor of {brief(decoding.noise_floor_rms)}"
        yield "as they are decoded", f"{brief(decoding.rms_error)}, {brief(decoding.ratio)} times {floor}"
    yield "largest error", f"{brief(logits.max_abs_error)} (noise floor {brief(logits.noise_floor_max)})"


def _others(report: ParityReport) -> Iterator[tuple[str, str]]:
    """Greedy decoding, what was asked for, and the time."""
    yield "greedy tokens", _greedy(report.greedy)
    difference = f"differs from transformers by up to {brief(report.bitwise.max_abs_error)}"
    yield "reference arithmetic", "equals transformers bit for bit" if report.bitwise.equal else difference
    for ordinary in report.noise or []:
        share = "no difference" if ordinary.share is None else f"this error is {brief(ordinary.share)} of it"
        yield ordinary.difference, f"{brief(ordinary.rms_error)}: {share}"
    if (text := report.perplexity) is not None:
        change = f"perplexity {precise(text.candidate)}, before {precise(text.reference)}"
        yield text.file, f"{change}; {text.tokens:,} tokens"
    if report.sensitivity is not None:
        worst = ", ".join(f"{site.site} {brief(site.rms_error)}" for site in report.sensitivity[:MOST_SITES])
        yield "most sensitive sites", worst
    if report.bisect is not None:
        what = "parity" if report.budget is None else "the budget"
        none = "no set of the swapped sites, on the texts as transformers wrote them"
        yield f"breaks {what}", ", ".join(report.bisect.sites) or none
    for line in report.budget or []:
        kept = "kept" if line.kept else "NOT kept"
        yield f"budget {line.quantity}", f"{brief(line.measured)} of {line.limit:g}: {kept}"
    yield "one forward", f"{brief(report.speed.candidate_ms)} ms (transformers {brief(report.speed.reference_ms)} ms)"
    shares = (percent(report.cost[f"{phase}_norm_share"]) for phase in ("prefill", "decode"))
    yield "norms' share of time", "prefill {}, decode {}".format(*shares)


def _greedy(greedy: Fields) -> str:
    parting, compared = greedy.first_divergence, greedy.tokens_compared
    if parting is None:
        return f"all {compared} agree"
    excuse = "within the noise" if parting.within_noise else "beyond the noise"
    return (
        f"{compared} compared; prompt {parting.prompt} parts at token {parting.token}, {excuse}: "
        f"margin {brief(parting.margin)}, noise {brief(parting.noise)}"
    )


def _worst_sites(sites: list[Fields]) -> Table:
    table = _table("norm site", "own error", "propagated error", "transformers' own", "swapped")
    for site in sorted(sites, key=lambda site: -site.local_error)[:MOST_SITES]:
        errors = map(brief, (site.local_error, site.propagated_error, site.noise))
        table.add_row(site.site, *errors, "yes" if site.swapped else "no")
    if len(sites) > MOST_SITES:
        table.caption = f"the {MOST_SITES} with the largest own error, of {len(sites)}"
        table.caption_justify = "left"
    return table


def _fit_and_removal(report: ParityReport) -> Iterator[RenderableType]:
    """What the sites explain before and after they were fitted, and the order in which they are swapped."""
    if report.fit is not None:
        table = _table("norm site", "explains", "fitted")
        for site in sorted(report.fit, key=lambda site: site.after):
            table.add_row(site.site, percent(site.before), percent(site.after))
        yield table
    if report.removal is not None:
        limit = next((line.limit for line in report.budget or [] if line.quantity == "kl"), None)
        allowed = sum(limit is not None and step.kl_mean <= limit for step in report.removal.steps)
        yield Text(
            ("" if limit is None else f"A KL divergence of {limit:g} allows {allowed} sites. ")
            + "The least harmful site is swapped first; figures are of one text:"
        )
        table = _table("sites swapped", "the last", "KL divergence", "loss")
        table.add_row("0", "", "0", precise(report.removal.loss))
        for number, step in enumerate(report.removal.steps, 1):
            table.add_row(str(number), step.site, brief(step.kl_mean), precise(step.loss))
        yield table
