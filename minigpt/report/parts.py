"""The parts of a parity report as data: what terminal and page print. All are made of the report."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from minigpt.files import finite
from minigpt.report import fields
from minigpt.report.charts import Maps, depth_charts
from minigpt.report.diagnosis import diagnosis_lines, precision_line
from minigpt.report.fields import (
    MOST_NOISE,
    BudgetLine,
    Form,
    NormSiteError,
    ParityFields,
    perplexities,
    population,
    shown,
    text_file,
)
from minigpt.report.numerals import brief, change, count, format_limit, is_finite, percent, precise, times, uncertain

WHY_MISSING = {
    "norms and blocks": "the candidate shows none at the original's paths",
    "norms by themselves": "a file cannot be given the original's input",
    "tokens one by one": "the candidate takes no cache of transformers, so it reads whole texts only",
    "gradients": "the candidate has none for the original's Parameters",
}
ABOUT_BUILT_IN = "These figures depend on the text. The built-in texts are short; --text FILE decides on yours."
ABOUT_BUILT_IN_OF_DEMO = (
    "These figures depend on the text. The built-in texts are short, and unlike the demo's training text on purpose, "
    "so that a change shows; --text FILE decides on yours."
)
FEW_ROWS = 5  # rows of a long table that a terminal shows
MOST_OPEN = 10  # rows of a long table that a page does not fold
HEADINGS = {
    "PASS": ("Parity holds", "Within the budget"),
    "FAIL": ("Parity does not hold", "Over the budget"),
    "DIFFERENT": ("A different model", "A different model"),
}  # by parity, and by a budget
MAPS = {
    "local_error": "Own error: a norm’s output, given the reference’s input",  # noqa: RUF001
    "propagated_error": "Error of its output in the running model",
}


def about_built_in(report: ParityFields) -> str:
    """Return a sentence on the built-in texts, which were written for the demo and which any other model reads too."""
    original = report.against or report.model
    return ABOUT_BUILT_IN_OF_DEMO if original == "demo" else ABOUT_BUILT_IN


class Number(NamedTuple):
    """A figure and how it is shown."""

    value: float | None
    form: Form = brief
    error: float | None = None  # its standard error

    @property
    def is_finite(self) -> bool:
        return is_finite(self.value)

    def __str__(self) -> str:
        return uncertain(self.value, self.error, self.form)


Cell = Number | str | None  # None: it was not measured
KeyFigure = tuple[str, Number, str]


class Part(NamedTuple):
    """A part of a report: a table, and on the page a drawing.

    Attributes:
        name: of its section on the page.
        about: a sentence.
        brief: how many rows a terminal shows; None: all.
        drawing: the template that draws ``data`` above the table.
        bars: the column that the page also shows as bars.
        folded: the summary under which the page folds the table; empty if it is open.
    """

    name: str
    title: str
    about: str
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[Cell]] = ()
    brief: int | None = None
    drawing: str | None = None
    data: Any = None
    bars: int | None = None
    folded: str = ""

    @property
    def tables(self) -> list[tuple[Sequence[Sequence[Cell]], str]]:
        """The rows in one or two tables of a page, each with the summary under which it is folded, or none."""
        if self.folded or self.drawing or not self.rows:
            return [(self.rows, self.folded or "In figures")] if self.rows else []
        if len(self.rows) <= MOST_OPEN + 6:
            return [(self.rows, "")]
        return [(self.rows[:MOST_OPEN], ""), (self.rows[MOST_OPEN:], f"The other {len(self.rows) - MOST_OPEN}")]


def heading(report: ParityFields) -> str:
    """Return the verdict in words."""
    return HEADINGS[report.outcome][report.budget is not None]


def about(report: ParityFields) -> str:
    """Describe what was judged."""
    norms = "LayerNorm" if report.against_norm == "fused" else f"{report.against_norm} norms"
    judged = f"{report.model} with {pair(report)}" if has_norm(report) else report.model
    against = f"{report.against or 'itself'} with {norms} in transformers"
    how = f"{report.dtype}, {report.attention}, {report.device}, {report.prompts}"
    return f"{judged}, against {against}: {how}"


def has_norm(report: ParityFields) -> bool:
    """Return whether a norm was in question; another program's file, a function or a module has its own."""
    return report.norm != "its own"


def pair(report: ParityFields) -> str:
    """Name the norm and the sites of a report, or what was judged if no norm was in question."""
    if not has_norm(report):
        return report.model
    return f"{report.norm} at {', '.join(report.sites)}"


def subject(report: ParityFields) -> str:
    """Name the norm and the model of a report."""
    return f"{report.norm} in {report.model}" if has_norm(report) else report.model


def sentences(report: ParityFields) -> list[str]:
    """Return the reasons of the verdict, and what else must be known to read it."""
    lines = list(report.reasons)
    if report.budget is not None:
        lines = [*_of_budget(report, report.budget), *lines]
    before, after = perplexities(report)
    if report.outcome == "DIFFERENT" and after < before:
        lines.append("A lower perplexity is not better here: it is another model's, and parity asks for the same.")
    is_measured = report.budget is not None or report.outcome == "DIFFERENT"
    if is_measured and report.built_in and text_file(report) is None:
        lines.append(about_built_in(report))
    if not lines:
        parting = report.greedy.first_divergence
        greedy = "diverges only within the noise" if parting else "agrees"
        ratio = times(report.logits.ratio)
        lines.append(f"The logits' error is {ratio} the noise floor, and greedy decoding {greedy}.")
    lines += precision_line(report) + diagnosis_lines(report)
    if (bisect := report.bisect) is not None:
        sites = ", ".join(bisect.sites) or "no set of the swapped sites, on the texts as transformers wrote them"
        lines.append(f"What breaks {'parity' if report.budget is None else 'the budget'}: {sites}.")
    lines += report.notes
    if report.missing:
        lines.append(f"Not judged: {'; '.join(f'{part}, since {WHY_MISSING[part]}' for part in report.missing)}.")
    return lines + _next_step(report)


def tiles(report: ParityFields) -> list[KeyFigure]:
    """Return the most important figures: a name, a number, and what stands beside it."""
    logits, distribution, greedy = report.logits, report.distribution, report.greedy
    if report.outcome == "DIFFERENT":
        before, after = perplexities(report)
        beside = f"the original's {precise(before)}, change {change(before, after)}"
        first = (
            f"perplexity of the {'prompts' if report.perplexity is None else 'text'}",
            Number(after, precise),
            beside,
        )
    else:
        beside = f"RMS error {brief(logits.rms_error)}, noise floor {brief(logits.noise_floor_rms)}"
        first = ("of the noise floor", Number(logits.ratio, times), beside)
    if (parting := greedy.first_divergence) is None:
        last = ("greedy tokens compared", Number(greedy.tokens_compared, count), "all the same")
    else:
        beside = f"of prompt {parting.prompt}, {'within' if parting.within_noise else 'beyond'} the noise"
        last = ("new token where greedy decoding parts", Number(parting.token, count), beside)
    kl, top1, top5 = distribution.kl_mean, distribution.top1_agreement, distribution.top5_agreement
    largest = f"mean, largest {brief(distribution.kl_max)}"
    return [
        first,
        (f"KL divergence, nats, of {population(report)}", Number(kl), largest),
        ("same likeliest token", Number(top1, percent), f"the five likeliest: {percent(top5)}"),
        last,
    ]


def _of_budget(report: ParityFields, budget: Sequence[BudgetLine]) -> list[str]:
    """Return the sentences on the budget: how many sites it allows, and that it is no parity."""
    limits = ", ".join(f"{line.quantity}={format_limit(line.quantity, line.limit)}" for line in budget)
    lines, removal, ratio = list[str](), report.removal, report.logits.ratio
    if removal is not None and removal.allowed is not None:
        sites = ", ".join(step.site for step in removal.steps[: removal.allowed]) or "none"
        lines.append(f"The budget {limits} allows {removal.allowed} of {len(report.norm_sites)} sites: {sites}.")
    if report.passed and not ratio <= MOST_NOISE:
        lines.append(
            f"The budget {limits} decides. By parity it is another model: its logits' error is {times(ratio)} the "
            "noise floor."
        )
    return lines


def _next_step(report: ParityFields) -> list[str]:
    """Return the commands that find the cause, after a FAIL."""
    if report.outcome != "FAIL" or (report.removal is not None and report.removal.allowed is not None):
        return []
    steps = []
    if report.exact and report.norm not in ("fused", "its own"):
        steps.append(f"minigpt norms --check {report.norm} names a mistake in the norm")
    if report.bisect is None and any(site.swapped for site in report.norm_sites):
        steps.append("--bisect names the sites that break it")
    if report.diagnosis is None and report.exact:
        steps.append("--diagnose names the mistake, if it is a known one")
    return [f"Next: {'; '.join(steps)}."] if steps else []


def parts_of(report: ParityFields) -> list[Part]:
    """Return the parts that a report has something for, the most important first."""
    central = {"logits": _logits, "distribution": _distribution}
    if report.outcome == "DIFFERENT":
        central = dict(reversed(central.items()))
    makers = {
        "budget": _budget, "diagnosis": _diagnosis, **central, "perplexity": _perplexity, "greedy": _greedy,
        "norm_sites": _sites, "gradients": _gradients, "removal": _removal, "sensitivity": _sensitivity, "fit": _fit,
        "bisect": _bisect, "coverage": _first_off, "tokens": _tokens, "prompts": _coverage, "versions": _conditions,
    }  # fmt: skip
    parts: list[Part] = []
    for name, make in makers.items():
        measured = getattr(report, name)
        if measured is not None:
            parts.append(make(report, measured))
    return [part for part in parts if part.rows]


def cell(figures: Any, key: str, form: Form = brief) -> Cell:
    """Return a figure with its standard error; None if it was not measured."""
    value = getattr(figures, key, None)
    return None if value is None else Number(value, form, getattr(figures, f"{key}_se", None))


def cells(kind: type, figures: Any) -> list[Cell]:
    """Return the figures of a class as the cells of a row."""
    return [cell(figures, key, figure.form) for key, figure in shown(kind).items()]


def titles(kind: type) -> list[str]:
    """Return the titles of the figures of a class, which head their columns."""
    return [figure.title for figure in shown(kind).values()]


def _rows(kind: type, figures: Any) -> list[tuple[str, Cell]]:
    """Return a row for each figure of a class that was measured."""
    return [(title, cell) for title, cell in zip(titles(kind), cells(kind, figures), strict=True) if cell is not None]


def _budget(report: ParityFields, budget: Sequence[BudgetLine]) -> Part:
    rows: list[tuple[Cell, ...]] = []
    for line in budget:
        form = partial(format_limit, line.quantity)
        kept = "✓ kept" if line.kept else "✗ not kept"
        rows.append((line.quantity, Number(line.limit, form), Number(line.measured, form), kept))
    sentence = "These limits decide, in place of parity."
    return Part("budget", "Budget", sentence, ("quantity", "limit", "measured", ""), rows)


def _diagnosis(report: ParityFields, diagnosis: Sequence[fields.Diagnosed]) -> Part:
    rows = [(row.mistake, *cells(fields.Diagnosed, row)) for row in diagnosis]
    sentence = "These are put into the original in float64, one on top of the other; the noise floor remains."
    return Part("diagnosis", "What is wrong", sentence, ("mistake", *titles(fields.Diagnosed)), rows)


def _logits(report: ParityFields, logits: fields.LogitsError) -> Part:
    rows: list[list[Cell]] = [["whole prompts", *cells(fields.LogitsError, logits)]]
    if report.decoding is not None:
        rows.append(["token by token", *cells(fields.LogitsError, report.decoding)])
    if (text := report.text) is not None:
        rows.append([text.file or f"text of {text.tokens:,} tokens", *cells(fields.LogitsError, text.logits)])
    if (stored := report.stored) is not None:
        rows.append([f"the truth in {stored.dtype}", *cells(fields.LogitsError, _of_stored(logits, stored))])
    sentence = f"Errors are from transformers in float64; the noise floor is its own at {report.dtype}."
    return Part("logits", "Logits", sentence, ("", *titles(fields.LogitsError)), rows)


def _of_stored(logits: fields.LogitsError, stored: fields.StoredLogits) -> fields.LogitsError:
    """Return the error of the true logits that are stored in a narrow dtype, beside the same noise floor."""
    return replace(
        logits, rms_error=stored.rms_error, max_abs_error=stored.max_abs_error, ratio=stored.ratio
    )  # fmt: skip


def _distribution(report: ParityFields, measured: fields.Distribution) -> Part:
    rows = _rows(fields.Distribution, measured)
    worst = measured.worst
    where = f"position {worst.position} of {fields.unit(report)} {worst.window}"
    rows.append(("the largest KL divergence is at", where + (f": {worst.text}" if worst.text else "")))
    sentence = f"Of {population(report)}, in nats, ± the standard error over {fields.unit(report)}s."
    return Part("distribution", "Next-token distribution", sentence, ("", "this model"), rows)


def _perplexity(report: ParityFields, text: fields.PerplexityChange) -> Part:
    changed = change(text.reference, text.candidate)
    rows = [*_rows(fields.PerplexityChange, text), ("change of perplexity", changed)]
    about = f"Of the whole of {text.file}, in windows that overlap."
    return Part("perplexity", "Perplexity", about, ("", "this model"), rows, brief=4)


def _greedy(report: ParityFields, greedy: fields.Greedy) -> Part:
    rows: list[tuple[Cell, ...]] = [("tokens compared", cell(greedy, "tokens_compared", count))]
    if (parting := greedy.first_divergence) is None:
        return Part("greedy", "Greedy decoding", "All tokens are those of transformers.", ("", "tokens"), rows)
    rows += _rows(fields.Divergence, parting)
    sentence = f"It parts from transformers, {'within' if parting.within_noise else 'beyond'} the noise."
    rows += [("this model goes on", parting.candidate_text), ("transformers goes on", parting.reference_text)]
    return Part("greedy", "Greedy decoding", sentence, ("", "there"), rows)


def _sites(report: ParityFields, sites: Sequence[NormSiteError]) -> Part:
    """Norms and blocks where an error begins come first: their own is large, or it grows over the place before."""
    places = [] if report.center else fields.places(report)  # else what goes in and out is not the original's
    blocks = {block.block for block in report.blocks}
    before, excess, rows = 1.0, dict[str, float](), dict[str, Sequence[Cell]]()
    for place in places:
        alone = fields.noise_ratio(_or_zero(place.local_error), _or_zero(place.noise))
        ratio = fields.noise_ratio(_or_zero(place.propagated_error), _or_zero(place.noise))
        excess[place.site] = max(alone, ratio / max(1.0, before))
        before = ratio
        row: list[Cell] = [place.site, *cells(NormSiteError, _known(place))]
        if has_norm(report):
            row.append("" if place.site in blocks else "yes" if place.swapped else "no")
        rows[place.site] = row
    heads = ["norm or block", *titles(NormSiteError)]
    if has_norm(report):
        heads.append("swapped")
    most_first = sorted(rows.values(), key=lambda row: -excess[str(row[0])])
    titles_of_maps = {key: title for key, title in MAPS.items() if _is_known(report, key)}
    drawn = [_drawn(site) for site in sites]
    charts = depth_charts(report.dtype, [finite(vars(block)) for block in report.blocks], drawn)
    maps = Maps(drawn, titles_of_maps, partial(brief, digits=2), charts)
    about = f"{_beginnings(report)}Relative RMS errors; where they grow most comes first."
    return Part("sites", "Where it happens", about, heads, most_first, FEW_ROWS, "maps", maps)


def _or_zero(x: float | None) -> float:
    """Return a number; 0 in place of one that is not known, or not finite."""
    return x if is_finite(x) else 0.0


def _known(place: NormSiteError) -> NormSiteError:
    """Return a norm or block whose own error is NaN where it is None in JSON because it is not finite.

    A norm whose own error is not finite gives an output whose error is not finite either. Where that is finite, nobody
    could ask for the norm's own error.
    """
    if place.local_error is None and not is_finite(place.propagated_error):
        return replace(place, local_error=math.nan)
    return place


def _drawn(place: NormSiteError) -> dict[str, Any]:
    """Return what a map draws of a norm: figures that are not finite are None, and what is not known is left out."""
    figures = finite(vars(_known(place)))
    if place.local_error is None and figures["propagated_error"] is not None:
        del figures["local_error"]
    return figures


def _is_known(report: ParityFields, error: str) -> bool:
    """Return whether a map of this error has anything to show."""
    return error != "local_error" or "norms by themselves" not in report.missing


def _beginnings(report: ParityFields) -> str:
    """Return the sentence that names where errors begin; empty if none does."""
    if len(report.new_errors) > 1:
        return f"An error of its own begins at each of {', '.join(report.new_errors)}. "
    off = report.first_off
    return f"An error begins at {off.place}. " if off else ""


def _gradients(report: ParityFields, gradients: Sequence[fields.GradientError]) -> Part:
    rows = [(row.parameter, *cells(fields.GradientError, row)) for row in gradients]
    sentence = f"Of the texts' loss, the worst first; above {MOST_NOISE:g} times transformers' own error is a fault."
    return Part("gradients", "Gradients", sentence, ("gradient of", *titles(fields.GradientError)), rows, FEW_ROWS)


def _removal(report: ParityFields, removal: fields.Removal) -> Part:
    rows: list[tuple[Cell, ...]] = [("none", "0", Number(removal.loss, precise), "0")]
    rows += [(step.site, *cells(fields.RemovalStep, step)) for step in removal.steps]
    sentence = (
        f"The least harmful site is swapped first and stays, then the next. KL divergence from the original, on "
        f"{count(removal.tokens)} tokens, ± the standard error over {fields.unit(report)}s."
    )
    heads = ("the last site", *titles(fields.RemovalStep))
    return Part("removal", "One site after another", sentence, heads, rows, bars=1)


def _sensitivity(report: ParityFields, sensitivity: Sequence[fields.SiteChange]) -> Part:
    rows = [(row.site, *cells(fields.SiteChange, row)) for row in sensitivity]
    sentence = "How far each site, swapped alone, moves the logits."
    return Part(
        "sensitivity", "Which sites matter", sentence, ("site", *titles(fields.SiteChange)), rows, FEW_ROWS, bars=1
    )


def explained(site: fields.SiteFit) -> float:
    """Return the share that a fitted norm explains; 0 for one that is not finite."""
    return _or_zero(site.after)


def _fit(report: ParityFields, fit: Sequence[fields.SiteFit]) -> Part:
    fits = sorted(fit, key=explained)
    rows = [(site.site, *cells(fields.SiteFit, site)) for site in fits]
    sentence = "The share of the variance of the original norm's output that this norm explains (R squared)."
    return Part("fit", "How much each site explains", sentence, ("norm site", *titles(fields.SiteFit)), rows)


def _bisect(report: ParityFields, bisect: fields.Bisection) -> Part:
    rows = [(", ".join(sites),) for sites in bisect.sets]
    sentence = (
        "These must have their own norm back for a pass; each set breaks it, and would not with any one left out. "
        f"Sets tried: {bisect.verdicts:,}."
    )
    return Part("bisect", "Which sites break it", sentence, ("set of sites",), rows)


def _tokens(report: ParityFields, tokens: fields.TextDivergence) -> Part:
    pairs = zip(tokens.pieces, tokens.kl, strict=True)
    rows = [(str(i), piece, Number(kl)) for i, (piece, kl) in enumerate(pairs)]
    sentence = "KL divergence from the truth, above the token at which it was predicted."
    heads = ("position", "token", "KL, nats")
    return Part("tokens", "Along a text", sentence, heads, rows, brief=0, drawing="tokens", data=tokens)


def _first_off(report: ParityFields, _coverage: fields.Coverage) -> Part:
    """The first prompt and the first window that are off, unless a shift is all there is."""
    found = (report.prompt_off, None if report.text is None else report.text.first_off)
    rows: dict[str, list[Cell]] = {}
    for column, (kind, off) in enumerate(zip((fields.PromptOff, fields.PositionOff), found, strict=True)):
        for title, cell in _rows(kind, off):
            rows.setdefault(title, [None, None])[column] = cell
    shown_rows = [] if fields.is_shifted(report) else [(title, *cells) for title, cells in rows.items()]
    sentence = "Where the logits begin to be off."
    return Part("first-off", "The first text that is off", sentence, ("", "prompts", "longer text"), shown_rows, 0)


def _coverage(report: ParityFields, _prompts: str) -> Part:
    """Return the facts that the verdict rests on."""
    facts: dict[str, Cell] = {"texts": report.prompts}
    if (text := report.text) is not None:
        windows = f"{text.windows:,} window{'s' if text.windows > 1 else ''} of {text.window:,}"
        facts["longer text"] = f"{text.file or 'built in'}: {text.tokens:,} tokens, {windows}"
    coverage, bitwise = report.coverage, report.bitwise
    facts["positions of the context"] = f"{coverage.positions:,} of {coverage.context:,}"
    facts["tokens of the vocabulary"] = f"{coverage.tokens:,} of {coverage.vocabulary:,}"
    if report.gradients is not None:
        facts["gradients"] = f"of {len(report.gradients):,} tensors"
    elif "gradients" not in report.missing:
        facts["gradients"] = "not compared; --gradients compares them" if has_norm(report) else "not compared"
    if bitwise is not None:
        differs = f"differs from transformers by up to {brief(bitwise.max_abs_error)}"
        facts["reference arithmetic"] = "equals transformers bit for bit" if bitwise.equal else differs
    sentence = "A fault that shows nowhere in these is not judged."
    return Part("coverage", "What was read", sentence, ("", "read"), list(facts.items()))


def _conditions(report: ParityFields, versions: Mapping[str, Any]) -> Part:
    names = ("model", "against", "norm", "sites", "dtype", "attention", "device")
    if not has_norm(report):
        names = tuple(name for name in names if name not in ("norm", "sites"))
    facts = {name: getattr(report, name) for name in names}
    facts |= {name.replace("_", " "): version for name, version in versions.items()}
    rows = [(name, ", ".join(fact) if isinstance(fact, list) else str(fact)) for name, fact in facts.items() if fact]
    return Part("conditions", "Measured on", "", ("", "value"), rows, brief=0)
