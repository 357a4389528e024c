"""A parity report for the terminal, and its parts as data, which the page prints too. All are made of the report."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import RenderableType

from minigpt.files import finite
from minigpt.precision import DTYPES, HALVES
from minigpt.report import sentences
from minigpt.report.account_fields import Account, ErrorShare, TensorShare
from minigpt.report.fields import (
    Bisection,
    BudgetLine,
    Coverage,
    Diagnosed,
    Distribution,
    Divergence,
    GradientError,
    Greedy,
    LogitsError,
    NormSiteError,
    PerplexityChange,
    PositionOff,
    PromptOff,
    Removal,
    RemovalStep,
    ReportFields,
    SiteChange,
    SiteFit,
    TextDivergence,
    Unjudged,
    has_norm,
    is_shifted,
    places,
    population,
    text_file,
)
from minigpt.report.noise import MOST_NOISE, noise_ratio
from minigpt.report.numerals import brief, change, count, format_limit, is_finite, precise, times
from minigpt.report.part import Cell, Number, Part, cell, cells, shown, titles
from minigpt.report.terminal import judged

FEW_ROWS = 5  # rows of a long table that a terminal shows
MAPS = {
    "local_error": "Own error: a norm’s output, given the reference’s input",  # noqa: RUF001
    "propagated_error": "Error of its output in the running model",
}


def parity_summary(report: ReportFields) -> RenderableType:
    """Return the verdict with its reasons, and the parts of a report.

    Args:
        report: made by a judgement, or read from a JSON file.
    """
    about = f"{sentences.heading(report)}: {sentences.about(report)}"
    return judged(report.outcome, about, sentences.sentences(report), parts_of(report))


def parts_of(report: ReportFields) -> list[Part]:
    """Return the parts that a report has something for, the most important first."""
    central = {"logits": _logits, "distribution": _distribution}
    if report.outcome == "DIFFERENT":
        central = dict(reversed(central.items()))
    makers = {
        "budget": _budget, "diagnosis": _diagnosis, "account": _account, **central, "perplexity": _perplexity,
        "greedy": _greedy, "norm_sites": _sites, "gradients": _gradients, "removal": _removal,
        "sensitivity": _sensitivity, "fit": _fit, "bisect": _bisect, "coverage": _first_off, "tokens": _tokens,
        "prompts": _coverage, "versions": _conditions,
    }  # fmt: skip
    parts: list[Part] = []
    for name, make in makers.items():
        measured = getattr(report, name)
        if measured is not None:
            parts.append(make(report, measured))
            if name == "account" and measured.tensors is not None:
                parts.append(_tensors(measured.tensors))
    return [part for part in parts if part.rows]


def _measured_rows(kind: type, figures: Any) -> list[tuple[str, Cell]]:
    """Return a row for each figure of a class that was measured."""
    rows = []
    for key, figure in shown(kind).items():
        measured = cell(figures, key, figure.form)
        if measured is not None:
            rows.append((figure.title, measured))
    return rows


def _named_rows(kind: type, name: str, members: Sequence[Any]) -> list[list[Cell]]:
    """Return a row for each of some figures of a class, which begins with its field ``name``."""
    rows = []
    for member in members:
        rows.append([getattr(member, name), *cells(kind, member)])
    return rows


def _budget(report: ReportFields, budget: Sequence[BudgetLine]) -> Part:
    rows: list[list[Cell]] = []
    for line in budget:
        form = partial(format_limit, line.quantity)
        kept = "✓ kept" if line.kept else "✗ not kept"
        rows.append([line.quantity, Number(line.limit, form), Number(line.measured, form), line.text, kept])
    sentence = "These limits decide, in place of parity."
    return Part("budget", "Budget", sentence, ("quantity", "limit", "measured", "on", ""), rows)


def _diagnosis(report: ReportFields, diagnosis: Sequence[Diagnosed]) -> Part:
    rows = _named_rows(Diagnosed, "mistake", diagnosis)
    where = "original" if report.account is None else "file's model"
    sentence = f"These are put into the {where} in float64, one on top of the other; the noise floor remains."
    return Part("diagnosis", "What is wrong", sentence, ("mistake", *titles(Diagnosed)), rows)


def _account(report: ReportFields, account: Account) -> Part:
    steps = [replace(step, part=f"with {step.part}") for step in account.steps]
    others = [replace(other, part=f"transformers at {other.part}") for other in account.precisions]
    shares = [account.total, account.weights, account.own, *steps]
    best = f"at the {account.calm} positions that agree best"
    noise = f"transformers at {account.dtype} with that arithmetic"
    errors = {
        best: account.calm_left,
        "that arithmetic in transformers in float64": account.effect,
        noise: account.noise,
        f"{noise}, {best}": account.calm_noise,
    }
    of_original: list[Cell] = ["the original", None, None, cell(account, "perplexity", precise)]
    rows = [of_original, *_named_rows(ErrorShare, "part", shares)]
    for name, error in errors.items() if steps else ():
        rows.append([name, Number(error, times), None, None])
    rows += _named_rows(ErrorShare, "part", others)
    sentence = (
        f"Of {account.tokens:,} tokens; errors are times transformers' own at {account.dtype} with the file's weights."
    )
    return Part("account", "Where the difference comes from", sentence, ("", *titles(ErrorShare)), rows)


def _tensors(tensors: Sequence[TensorShare]) -> Part:
    rows: list[list[Cell]] = []
    kinds: dict[str, float] = {}
    for tensor in tensors:
        rows.append([tensor.site, tensor.kind, *cells(TensorShare, tensor)])
        kinds[tensor.kind] = kinds.get(tensor.kind, 0.0) + tensor.alone
    by_kind = ", ".join(f"{kind} {brief(cost)}" for kind, cost in kinds.items())
    title = "KL divergence of the original with the file’s tensor in it"  # noqa: RUF001
    maps = {"sites": [vars(tensor) for tensor in tensors], "titles": {"alone": title}, "form": brief}
    heads = ("tensor", "stored as", *titles(TensorShare))
    about = f"Mean KL divergences, in nats. Those of the tensors alone, together by type: {by_kind}."
    return Part("tensors", "Which tensors cost most", about, heads, rows, FEW_ROWS, "maps", maps)


def _logits(report: ReportFields, logits: LogitsError) -> Part:
    errors = {"whole prompts": logits}
    if report.decoding is not None:
        errors["token by token"] = report.decoding
    text, stored = report.text, report.stored
    if text is not None:
        errors[text.file or f"text of {text.tokens:,} tokens"] = text.logits
    if stored is not None:  # the noise floor is the same
        errors[f"the truth in {stored.dtype}"] = replace(
            logits, rms_error=stored.rms_error, max_abs_error=stored.max_abs_error, ratio=stored.ratio
        )
    rows = [[name, *cells(LogitsError, error)] for name, error in errors.items()]
    sentence = f"Errors are from transformers in float64; the noise floor is its own at {report.dtype}."
    return Part("logits", "Logits", sentence, ("", *titles(LogitsError)), rows)


def _distribution(report: ReportFields, measured: Distribution) -> Part:
    rows = _measured_rows(Distribution, measured)
    worst = measured.worst
    of_what = _unit(report)
    where = f"position {worst.position} of {of_what} {worst.window}"
    if worst.text:
        where += f": {worst.text}"
    rows.append(("the largest KL divergence is at", where))
    sentence = f"Of {population(report)}, in nats, ± the standard error over {of_what}s."
    return Part("distribution", "Next-token distribution", sentence, ("", "this model"), rows)


def _unit(report: ReportFields) -> str:
    """Return the unit of the standard errors: "window" or "text"."""
    return "window" if text_file(report) else "text"


def _perplexity(report: ReportFields, text: PerplexityChange) -> Part:
    rows = _measured_rows(PerplexityChange, text)
    rows.append(("change of perplexity", change(text.reference, text.candidate)))
    about = f"Of the whole of {text.file}, in windows that overlap."
    return Part("perplexity", "Perplexity", about, ("", "this model"), rows, brief=4)


def _greedy(report: ReportFields, greedy: Greedy) -> Part:
    rows = [("tokens compared", cell(greedy, "tokens_compared", count))]
    parting = greedy.first_divergence
    if parting is None:
        return Part("greedy", "Greedy decoding", "All tokens are the same as transformers'.", ("", "tokens"), rows)
    rows += _measured_rows(Divergence, parting)
    rows.append(("this model goes on", parting.candidate_text))
    rows.append(("transformers goes on", parting.reference_text))
    sentence = f"It diverges from transformers, {parting.where} the noise."
    return Part("greedy", "Greedy decoding", sentence, ("", "there"), rows)


def _sites(report: ReportFields, sites: Sequence[NormSiteError]) -> Part:
    """Norms and blocks where an error begins come first."""
    ordered: list[NormSiteError] = []
    if not report.center:  # else what goes in and out is not the original's
        ordered = _by_growth(places(report))
    rows: list[list[Cell]] = []
    for place in ordered:
        row = [place.site, *cells(NormSiteError, _with_known_error(place))]
        if has_norm(report):
            is_block = any(place.site == block.block for block in report.blocks)
            swapped = "yes" if place.swapped else "no"
            row.append("" if is_block else swapped)
        rows.append(row)
    heads = ["norm or block", *titles(NormSiteError)]
    if has_norm(report):
        heads.append("swapped")
    shown_maps = dict(MAPS)
    if Unjudged.ALONE in report.missing:
        del shown_maps["local_error"]
    drawn: list[dict[str, Any]] = []  # figures that are not finite are None, and what is not known is left out
    for site in sites:
        figures = finite(vars(_with_known_error(site)))
        if site.local_error is None and figures["propagated_error"] is not None:
            del figures["local_error"]
        drawn.append(figures)
    blocks = [finite(vars(block)) for block in report.blocks]
    form = partial(brief, digits=2)
    maps = {"sites": drawn, "titles": shown_maps, "form": form, "dtype": report.dtype, "blocks": blocks}
    begins = ""
    if len(report.new_errors) > 1:
        begins = f"An error of its own begins at each of {', '.join(report.new_errors)}. "
    elif report.first_off is not None:
        begins = f"An error begins at {report.first_off.place}. "
    sentence = f"{begins}Relative RMS errors; where they grow most comes first."
    return Part("sites", "Where it happens", sentence, heads, rows, FEW_ROWS, "maps", maps)


def _by_growth(ordered: list[NormSiteError]) -> list[NormSiteError]:
    """Return norms and blocks by how large their own error is, or how much the error grows over the place before."""
    growth: dict[str, float] = {}
    before = 1.0
    for place in ordered:
        noise = _or_zero(place.noise)
        local_ratio = noise_ratio(_or_zero(place.local_error), noise)
        ratio = noise_ratio(_or_zero(place.propagated_error), noise)
        growth[place.site] = max(local_ratio, ratio / max(1.0, before))
        before = ratio
    return sorted(ordered, key=lambda place: -growth[place.site])


def _or_zero(x: float | None) -> float:
    """Return a number; 0 in place of one that is not known, or not finite."""
    return x if is_finite(x) else 0.0


def _with_known_error(place: NormSiteError) -> NormSiteError:
    """Return a norm or block whose own error is NaN where it is None in JSON because it is not finite.

    A norm whose own error is not finite gives an output whose error is not finite either. Where that is finite, nobody
    could ask for the norm's own error.
    """
    if place.local_error is None and not is_finite(place.propagated_error):
        return replace(place, local_error=math.nan)
    return place


def _gradients(report: ReportFields, gradients: Sequence[GradientError]) -> Part:
    rows = _named_rows(GradientError, "parameter", gradients)
    sentence = f"Of the texts' loss, the worst first; above {MOST_NOISE:g} times transformers' own error is a fault."
    sites = {site.site for site in report.norm_sites}
    of_shifts = [row.noise for row in gradients if row.parameter.removesuffix(".bias") in sites]
    if of_shifts and report.device == "cpu" and DTYPES[report.dtype] in HALVES:
        sentence += (
            f" On a CPU PyTorch's LayerNorm adds the gradients of scale and shift in {report.dtype}, so transformers' "
            f"own error has what that loses: shifts are off by up to {max(of_shifts):.2g} of their size."
        )
    return Part("gradients", "Gradients", sentence, ("gradient of", *titles(GradientError)), rows, FEW_ROWS)


def _removal(report: ReportFields, removal: Removal) -> Part:
    none: list[Cell] = ["none", "0", Number(removal.loss, precise), "0"]
    rows = [none, *_named_rows(RemovalStep, "site", removal.steps)]
    sentence = (
        f"The least harmful site is swapped first and stays, then the next. KL divergence from the original, on "
        f"{count(removal.tokens)} tokens, ± the standard error over {_unit(report)}s."
    )
    heads = ("the last site", *titles(RemovalStep))
    return Part("removal", "One site after another", sentence, heads, rows, bars=1)


def _sensitivity(report: ReportFields, sensitivity: Sequence[SiteChange]) -> Part:
    rows = _named_rows(SiteChange, "site", sensitivity)
    sentence = "How far each site, swapped alone, moves the logits."
    return Part("sensitivity", "Which sites matter", sentence, ("site", *titles(SiteChange)), rows, FEW_ROWS, bars=1)


def _fit(report: ReportFields, fit: Sequence[SiteFit]) -> Part:
    fits = sorted(fit, key=lambda site: _or_zero(site.after))
    rows = _named_rows(SiteFit, "site", fits)
    sentence = "The share of the variance of the original norm's output that this norm explains (R squared)."
    return Part("fit", "How much each site explains", sentence, ("norm site", *titles(SiteFit)), rows)


def _bisect(report: ReportFields, bisect: Bisection) -> Part:
    rows = [[", ".join(sites)] for sites in bisect.sets]
    sentence = (
        "These must have their own norm back for a pass; each set breaks it, and would not with any one left out. "
        f"Sets tried: {bisect.verdicts:,}."
    )
    return Part("bisect", "Which sites break it", sentence, ("set of sites",), rows)


def _tokens(report: ReportFields, tokens: TextDivergence) -> Part:
    rows: list[list[Cell]] = []
    for position, (piece, kl) in enumerate(zip(tokens.pieces, tokens.kl, strict=True)):
        rows.append([str(position), piece, Number(kl)])
    sentence = "KL divergence from the truth, above the token at which it was predicted."
    heads = ("position", "token", "KL, nats")
    return Part("tokens", "Along a text", sentence, heads, rows, brief=0, drawing="tokens", data=tokens)


def _first_off(report: ReportFields, _coverage: Coverage) -> Part:
    """The first prompt and the first window that are off, unless a shift is all there is."""
    of_prompts = dict(_measured_rows(PromptOff, report.prompt_off))
    of_text = {}
    if report.text is not None:
        of_text = dict(_measured_rows(PositionOff, report.text.first_off))
    rows = []
    if not is_shifted(report):
        rows = [(title, of_prompts.get(title), of_text.get(title)) for title in of_prompts | of_text]
    sentence = "Where the logits begin to be off."
    return Part("first-off", "The first text that is off", sentence, ("", "prompts", "longer text"), rows, 0)


def _coverage(report: ReportFields, _prompts: str) -> Part:
    """Return the facts that the verdict rests on."""
    facts: dict[str, Cell] = {"texts": report.prompts}
    text, coverage, bitwise = report.text, report.coverage, report.bitwise
    if text is not None:
        windows = "windows" if text.windows > 1 else "window"
        name = text.file or "built in"
        facts["longer text"] = f"{name}: {text.tokens:,} tokens, {text.windows:,} {windows} of {text.window:,}"
    facts["positions of the context"] = f"{coverage.positions:,} of {coverage.context:,}"
    facts["tokens of the vocabulary"] = f"{coverage.tokens:,} of {coverage.vocabulary:,}"
    if report.gradients is not None:
        facts["gradients"] = f"of {len(report.gradients):,} tensors"
    elif Unjudged.GRADIENTS not in report.missing:
        facts["gradients"] = "not compared"
        if has_norm(report):
            facts["gradients"] = "not compared; --gradients compares them"
    if bitwise is not None:
        facts["reference arithmetic"] = f"differs from transformers by up to {brief(bitwise.max_abs_error)}"
        if bitwise.equal:
            facts["reference arithmetic"] = "equals transformers bit for bit"
    sentence = "A fault that shows nowhere in these is not judged."
    return Part("coverage", "What was read", sentence, ("", "read"), list(facts.items()))


def _conditions(report: ReportFields, versions: Mapping[str, Any]) -> Part:
    facts = {"model": report.model, "against": report.against}
    if has_norm(report):
        facts |= {"norm": report.norm, "sites": ", ".join(report.sites)}
    facts |= {"dtype": report.dtype, "attention": report.attention, "device": report.device}
    for name, version in versions.items():
        facts[name.replace("_", " ")] = version
    rows = [(name, str(fact)) for name, fact in facts.items() if fact]
    return Part("conditions", "Measured on", "", ("", "value"), rows, brief=0)
