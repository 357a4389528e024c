"""A parity report as people read it in a terminal."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from minigpt.report.numerals import brief, change, is_finite, percent, precise, uncertain
from minigpt.report.parity_report import Fields, ParityReport, in_kind, population

MOST_SITES = 5
STYLES = {"PASS": "bold green", "FAIL": "bold red", "DIFFERENT": "bold yellow"}


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
    closeness = [*_logits(report), *_distribution(report)]
    if report.outcome == "DIFFERENT":
        closeness = [*_distribution(report), *_logits(report)]
    for name, figure in (*_removed(report), *closeness, *_others(report)):
        figures.add_row(Text(name), Text(figure))
    return Group(
        outcome(report.outcome, about),
        *(Padding(Text(sentence), (0, 0, 0, 2), expand=False) for sentence in sentences),
        figures,
        *_worst_sites(report.norm_sites),
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
        limits = ", ".join(f"{line.quantity}={in_kind(line.quantity, line.limit)}" for line in report.budget)
        yield f"{limits} allows", f"{removal.allowed} of {len(report.norm_sites)} sites: {sites or 'none'}"


def _distribution(report: ParityReport) -> Iterator[tuple[str, str]]:
    """Figures of one set of tokens, which the first line names."""
    measured = report.distribution
    yield "next-token distribution", f"of {population(report)}, ± standard error by text"
    yield (
        "  KL divergence",
        f"mean {uncertain(measured.kl_mean, measured.kl_mean_se)}, median {brief(measured.kl_median)}, 99.9th "
        f"percentile {brief(measured.kl_p999)}, largest {brief(measured.kl_max)} nats",
    )
    first = uncertain(measured.top1_agreement, measured.top1_agreement_se, percent)
    yield "  likeliest tokens", f"same first {first}, five in common {percent(measured.top5_agreement)}"
    if is_finite(measured.loss_change):
        yield "  change of loss", f"{uncertain(measured.loss_change, measured.loss_change_se)} nats a token"
    text = report.perplexity
    if not is_finite(measured.perplexity_reference):
        yield "  perplexity", "nothing to predict: no prompt has two tokens"
    elif text is None or measured.tokens != text.tokens - 1:
        yield "  perplexity", _perplexity(measured.perplexity_reference, measured.perplexity_candidate)
    if text is not None:
        yield f"perplexity of {text.file}", f"{_perplexity(text.reference, text.candidate)}; {text.tokens:,} tokens"


def _perplexity(before: float, after: float) -> str:
    return f"{precise(after)} (before {precise(before)}, {change(before, after)})"


def _logits(report: ParityReport) -> Iterator[tuple[str, str]]:
    logits = report.logits
    yield (
        "logits' RMS error",
        f"{brief(logits.rms_error)}, {brief(logits.ratio)} times the noise floor of {brief(logits.noise_floor_rms)}, "
        f"on logits of scale {brief(logits.scale)}",
    )
    for name, part in (
        ("as they are decoded", report.decoding),
        (_text_name(report), (report.text or Fields(logits=None)).logits),
    ):
        if part is not None:
            yield (
                name,
                f"{brief(part.rms_error)}, {brief(part.ratio)} times the noise floor of {brief(part.noise_floor_rms)}",
            )
    yield "largest error", f"{brief(logits.max_abs_error)} (noise floor {brief(logits.noise_floor_max)})"


def _text_name(report: ParityReport) -> str:
    text = report.text or Fields(file=None, tokens=0)
    return f"on {text.tokens:,} tokens of {text.file}" if text.file else f"on a text of {text.tokens + 1:,} tokens"


def _others(report: ParityReport) -> Iterator[tuple[str, str]]:
    """Greedy decoding, and what was asked for."""
    yield "greedy tokens", _greedy(report.greedy)
    difference = f"differs from transformers by up to {brief(report.bitwise.max_abs_error)}"
    yield "reference arithmetic", "equals transformers bit for bit" if report.bitwise.equal else difference
    for ordinary in report.noise or []:
        share = "no difference" if ordinary.share is None else f"this error is {brief(ordinary.share)} of it"
        yield ordinary.difference, f"{brief(ordinary.rms_error)}: {share}"
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
            f"{in_kind(line.quantity, line.measured)} of {in_kind(line.quantity, line.limit)}: {kept}",
        )


def _greedy(greedy: Fields) -> str:
    parting, compared = greedy.first_divergence, greedy.tokens_compared
    if parting is None:
        return f"all {compared} agree"
    excuse = "within the noise" if parting.within_noise else "beyond the noise"
    return (
        f"{compared} compared; prompt {parting.prompt} parts at token {parting.token}, {excuse}: "
        f"margin {brief(parting.margin)}, noise {brief(parting.noise)}"
    )


def _worst_sites(sites: list[Fields]) -> Iterator[Table]:
    """The sites with the largest own error, or if that is not known, with the largest error of their output."""
    if not sites:
        return
    key = "local_error" if sites[0].local_error is not None else "propagated_error"
    table = _table("norm site", "own error", "propagated error", "transformers' own", "swapped")
    for site in sorted(sites, key=lambda site: -site[key])[:MOST_SITES]:
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
    """Tables of what was asked for: gradients, attention, what sites explain, the order in which they are swapped."""
    if report.gradients is not None:
        table = _table("gradient of", "relative error", "transformers' own", "ratio")
        for row in report.gradients[:MOST_SITES]:
            table.add_row(row.parameter, brief(row.relative_error), brief(row.noise), brief(row.ratio))
        table.caption, table.caption_justify = f"the {MOST_SITES} largest ratios, of {len(report.gradients)}", "left"
        yield table
    if report.attention_maps is not None:
        yield Text("Share of each head's attention on the first position, before and with this norm, by layer:")
        maps = report.attention_maps["first"]
        table = _table("layer", *(f"head {i}" for i in range(len(maps.before[0]))))
        for layer, pairs in enumerate(zip(maps.before, maps.after, strict=True)):
            table.add_row(str(layer), *(f"{before:.2f} {after:.2f}" for before, after in zip(*pairs, strict=True)))
        yield table
    if report.fit is not None:
        table = _table("norm site", "explains", "fitted")
        for site in sorted(report.fit, key=lambda site: site.after):
            table.add_row(site.site, percent(site.before), percent(site.after))
        yield table
    if (removal := report.removal) is not None:
        yield Text(f"The least harmful site is swapped first; figures are of {removal.tokens:,} tokens, ± by text:")
        table = _table("sites swapped", "the last", "KL divergence", "loss", "change of loss")
        table.add_row("0", "", "0", precise(removal.loss), "0")
        for number, step in enumerate(removal.steps, 1):
            kl = uncertain(step.kl_mean, step.kl_mean_se)
            table.add_row(
                str(number), step.site, kl, precise(step.loss), uncertain(step.loss_change, step.loss_change_se)
            )
        yield table
