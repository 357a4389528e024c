"""A report as a person reads it in a terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from minigpt.lab.report import NormSite, ParityReport

MOST_SITES = 5


def parity_summary(report: ParityReport) -> RenderableType:
    """The verdict with its reasons, the figures, and the norm sites that are furthest off."""
    verdict = Text("PASS" if report.passed else "FAIL", style="bold green" if report.passed else "bold red")
    verdict.append(
        f"  {report.model} with {report.norm} at {', '.join(report.sites)}: {report.dtype}, {report.attention}, "
        f"{report.device}, {report.prompts}",
        style="not bold default",
    )
    reasons = [Text(f"  {reason}") for reason in report.reasons]
    return Group(verdict, *reasons, _figures(report), _worst_sites(report.norm_sites))


def _figures(report: ParityReport) -> Table:
    logits, distribution, bitwise, speed = report.logits, report.distribution, report.bitwise, report.speed
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, figure in (
        ("logits' RMS error", f"{logits.rms_error:.3g}, {logits.ratio:.3g} times the noise floor of "
                              f"{logits.noise_floor_rms:.3g}, on logits of scale {logits.scale:.3g}"),
        ("largest error", f"{logits.max_abs_error:.3g} (noise floor {logits.noise_floor_max:.3g})"),
        ("same likeliest token", f"{distribution.top1_agreement:.2%}"),
        ("KL divergence", f"mean {distribution.kl_mean:.3g}, largest {distribution.kl_max:.3g} nats"),
        ("perplexity", f"{distribution.perplexity_candidate:.6g} (truth {distribution.perplexity_reference:.6g})"),
        ("greedy tokens", _greedy(report)),
        ("reference arithmetic", "equals transformers bit for bit" if bitwise.equal
                                 else f"differs from transformers by up to {bitwise.max_abs_error:.3g}"),
        ("one forward", f"{speed.candidate_ms:.3g} ms (transformers {speed.reference_ms:.3g} ms)"),
    ):  # fmt: skip
        table.add_row(name, figure)
    return table


def _greedy(report: ParityReport) -> str:
    parting, compared = report.greedy.first_divergence, report.greedy.tokens_compared
    if parting is None:
        return f"all {compared} agree"
    excuse = "within the noise" if parting.within_noise else "beyond the noise"
    return (
        f"{compared} compared; prompt {parting.prompt} parts at token {parting.token}, {excuse}: "
        f"margin {parting.margin:.3g}, noise {parting.noise:.3g}"
    )


def _worst_sites(sites: list[NormSite]) -> Table:
    table = Table(
        "norm site", "own error", "error that reached it", "swapped", title_justify="left", box=None, pad_edge=False
    )
    for site in sorted(sites, key=lambda site: -site.local_error)[:MOST_SITES]:
        table.add_row(
            site.site, f"{site.local_error:.3g}", f"{site.propagated_error:.3g}", "yes" if site.swapped else "no"
        )
    if len(sites) > MOST_SITES:
        table.caption = f"the {MOST_SITES} with the largest own error, of {len(sites)}"
        table.caption_justify = "left"
    return table
