"""The parts of a parity report as data: what terminal and page print. All are made of the report's JSON."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from minigpt.errors import MiniGPTError
from minigpt.report import fields
from minigpt.report.charts import Maps, depth_charts
from minigpt.report.diagnosis import diagnosis_lines, precision_line
from minigpt.report.fields import MOST_NOISE, Form, Report, perplexities, population, shown, text_file
from minigpt.report.numerals import brief, change, count, format_limit, percent, precise, times, uncertain
from minigpt.report.parity_report import ParityReport

WHY_MISSING = {
    "norms and blocks": "the candidate shows none at the original's paths",
    "norms by themselves": "a file cannot be given the original's input",
    "tokens one by one": "the candidate takes no cache of transformers, so it reads whole texts only",
    "gradients": "the candidate has none for the original's Parameters",
}
BUILT_IN = "These figures depend on the text. The built-in texts are short; --text FILE decides on yours."
BUILT_IN_OF_DEMO = (
    "These figures depend on the text. The built-in texts are short, and unlike the demo's training text on purpose, "
    "so that a change shows; --text FILE decides on yours."
)
GONE = {"speed"}  # fields that reports of older versions have
FEW = 5  # rows of a long table that a terminal shows
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


def about_built_in(report: Report) -> str:
    """Return a sentence on the built-in texts, which were written for the demo and which any other model reads too."""
    original = report.get("against") or report["model"]
    return BUILT_IN_OF_DEMO if original == "demo" else BUILT_IN


class Number(NamedTuple):
    """A figure and how it is shown; None as its value is a number that is not finite."""

    value: float | None
    form: Form = brief
    error: float | None = None  # its standard error

    def __str__(self) -> str:
        return uncertain(self.value, self.error, self.form)


Cell = Number | str | None  # None: it was not measured
Tile = tuple[str, Number, str]


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


def checked(reports: Sequence[Report]) -> list[Report]:
    """Return what was measured of each report, with its outcome.

    Raises:
        MiniGPTError: if one of them is not a parity report of this version.
    """
    names = {field.name for field in dataclasses.fields(ParityReport)}
    for number, report in enumerate(reports, 1):
        if not isinstance(report, dict) or report.keys() - GONE != names:
            raise MiniGPTError(
                f"report {number} is not a parity report of this version; write one with minigpt parity --json FILE"
            )
    shown: list[Report] = []
    for report in reports:
        measured = {name: value for name, value in report.items() if value is not None and name in names}
        shown.append(measured | {"outcome": fields.outcome_of(report)})
    return shown


def heading(report: Report) -> str:
    """Return the verdict in words."""
    return HEADINGS[report["outcome"]]["budget" in report]


def about(report: Report) -> str:
    """Describe what was judged."""
    norms = "LayerNorm" if report["against_norm"] == "fused" else f"{report['against_norm']} norms"
    judged = f"{report['model']} with {pair(report)}" if has_norm(report) else report["model"]
    against = f"{report.get('against', 'itself')} with {norms} in transformers"
    how = f"{report['dtype']}, {report['attention']}, {report['device']}, {report['prompts']}"
    return f"{judged}, against {against}: {how}"


def has_norm(report: Report) -> bool:
    """Return whether a norm was in question; another program's file, a function or a module has its own."""
    return report["norm"] != "its own"


def pair(report: Report) -> str:
    """Name the norm and the sites of a report, or what was judged if no norm was in question."""
    if not has_norm(report):
        return report["model"]
    return f"{report['norm']} at {', '.join(report['sites'])}"


def subject(report: Report) -> str:
    """Name the norm and the model of a report."""
    return f"{report['norm']} in {report['model']}" if has_norm(report) else report["model"]


def sentences(report: Report) -> list[str]:
    """Return the reasons of the verdict, and what else must be known to read it."""
    lines = [*_of_budget(report), *report["reasons"]] if "budget" in report else list(report["reasons"])
    before, after = perplexities(report)
    if report["outcome"] == "DIFFERENT" and None not in (before, after) and after < before:
        lines.append("A lower perplexity is not better here: it is another model's, and parity asks for the same.")
    is_measured = "budget" in report or report["outcome"] == "DIFFERENT"
    if is_measured and report["built_in"] and text_file(report) is None:
        lines.append(about_built_in(report))
    if not lines:
        parting = report["greedy"].get("first_divergence")
        greedy = "parts only where noise alone could part it" if parting else "agrees"
        ratio = times(report["logits"]["ratio"])
        lines.append(f"The logits' error is {ratio} the noise floor, and greedy decoding {greedy}.")
    lines += precision_line(report) + diagnosis_lines(report)
    if (bisect := report.get("bisect")) is not None:
        sites = ", ".join(bisect["sites"]) or "no set of the swapped sites, on the texts as transformers wrote them"
        lines.append(f"What breaks {'the budget' if 'budget' in report else 'parity'}: {sites}.")
    lines += report["notes"]
    if report["missing"]:
        lines.append(f"Not judged: {'; '.join(f'{part}, since {WHY_MISSING[part]}' for part in report['missing'])}.")
    return lines + _next_step(report)


def tiles(report: Report) -> list[Tile]:
    """Return the most important figures: a name, a number, and what stands beside it."""
    logits, distribution, greedy = (report[name] for name in ("logits", "distribution", "greedy"))
    if report["outcome"] == "DIFFERENT":
        before, after = perplexities(report)
        beside = f"the original's {precise(before)}, change {change(before, after)}"
        first = (f"perplexity of the {'text' if 'perplexity' in report else 'prompts'}", Number(after, precise), beside)
    else:
        beside = f"RMS error {brief(logits['rms_error'])}, noise floor {brief(logits['noise_floor_rms'])}"
        first = ("of the noise floor", Number(logits["ratio"], times), beside)
    if (parting := greedy.get("first_divergence")) is None:
        last = ("greedy tokens compared", Number(greedy["tokens_compared"], count), "all the same")
    else:
        beside = f"of prompt {parting['prompt']}, {'within' if parting['within_noise'] else 'beyond'} the noise"
        last = ("new token where greedy decoding parts", Number(parting["token"], count), beside)
    kl, top1, top5 = (distribution[name] for name in ("kl_mean", "top1_agreement", "top5_agreement"))
    largest = f"mean, largest {brief(distribution['kl_max'])}"
    return [
        first,
        (f"KL divergence, nats, of {population(report)}", Number(kl), largest),
        ("same likeliest token", Number(top1, percent), f"the five likeliest: {percent(top5)}"),
        last,
    ]


def _of_budget(report: Report) -> list[str]:
    """Return the sentences on the budget: how many sites it allows, and that it is no parity."""
    limits = ", ".join(
        f"{line['quantity']}={format_limit(line['quantity'], line['limit'])}" for line in report["budget"]
    )
    lines, removal, ratio = [], report.get("removal", {}), report["logits"]["ratio"]
    if (allowed := removal.get("allowed")) is not None:
        sites = ", ".join(step["site"] for step in removal["steps"][:allowed]) or "none"
        lines.append(f"The budget {limits} allows {allowed} of {len(report['norm_sites'])} sites: {sites}.")
    if report["outcome"] == "PASS" and (ratio is None or ratio > MOST_NOISE):
        lines.append(
            f"The budget {limits} decides. By parity it is another model: its logits' error is {times(ratio)} the "
            "noise floor."
        )
    return lines


def _next_step(report: Report) -> list[str]:
    """Return the commands that find the cause, after a FAIL."""
    if report["outcome"] != "FAIL" or report.get("removal", {}).get("allowed") is not None:
        return []
    steps = []
    if report["exact"] and report["norm"] not in ("fused", "its own"):
        steps.append(f"minigpt norms --check {report['norm']} names a mistake in the norm")
    if "bisect" not in report and any(site["swapped"] for site in report["norm_sites"]):
        steps.append("--bisect names the sites that break it")
    if "diagnosis" not in report and report["exact"]:
        steps.append("--diagnose names the mistake, if it is a known one")
    return [f"Next: {'; '.join(steps)}."] if steps else []


def parts_of(report: Report) -> list[Part]:
    """Return the parts that a report has something for, the most important first."""
    central = {"logits": _logits, "distribution": _distribution}
    if report["outcome"] == "DIFFERENT":
        central = dict(reversed(central.items()))
    makers = {
        "budget": _budget, "diagnosis": _diagnosis, **central, "perplexity": _perplexity, "greedy": _greedy,
        "norm_sites": _sites, "gradients": _gradients, "removal": _removal, "sensitivity": _sensitivity, "fit": _fit,
        "bisect": _bisect, "coverage": _first_off, "tokens": _tokens, "prompts": _coverage, "versions": _conditions,
    }  # fmt: skip
    parts = [make(report) for name, make in makers.items() if name in report]
    return [part for part in parts if part.rows]


def cell(figures: Report, key: str, form: Form = brief) -> Cell:
    """Return a figure with its standard error; None if it was not measured."""
    return Number(figures[key], form, figures.get(f"{key}_se")) if key in figures else None


def cells(kind: type, figures: Report) -> list[Cell]:
    """Return the figures of a class as the cells of a row."""
    return [cell(figures, key, figure.form) for key, figure in shown(kind).items()]


def titles(kind: type) -> list[str]:
    """Return the titles of the figures of a class, which head their columns."""
    return [figure.title for figure in shown(kind).values()]


def _rows(kind: type, figures: Report) -> list[tuple[str, Cell]]:
    """Return a row for each figure of a class that was measured."""
    return [(title, cell) for title, cell in zip(titles(kind), cells(kind, figures), strict=True) if cell is not None]


def _budget(report: Report) -> Part:
    rows: list[tuple[Cell, ...]] = []
    for line in report["budget"]:
        form = partial(format_limit, line["quantity"])
        kept = "✓ kept" if line["kept"] else "✗ not kept"
        rows.append((line["quantity"], Number(line["limit"], form), Number(line["measured"], form), kept))
    sentence = "These limits decide, in place of parity."
    return Part("budget", "Budget", sentence, ("quantity", "limit", "measured", ""), rows)


def _diagnosis(report: Report) -> Part:
    rows = [(row["mistake"], *cells(fields.Diagnosed, row)) for row in report["diagnosis"]]
    sentence = "These are put into the original in float64, one on top of the other; the noise floor remains."
    return Part("diagnosis", "What is wrong", sentence, ("mistake", *titles(fields.Diagnosed)), rows)


def _logits(report: Report) -> Part:
    rows: list[list[Cell]] = [["whole prompts", *cells(fields.LogitsError, report["logits"])]]
    if "decoding" in report:
        rows.append(["token by token", *cells(fields.LogitsError, report["decoding"])])
    if (text := report.get("text")) is not None:
        rows.append([text["file"] or f"text of {text['tokens']:,} tokens", *cells(fields.LogitsError, text["logits"])])
    if (stored := report.get("stored")) is not None:
        rows.append([f"the truth in {stored['dtype']}", *cells(fields.LogitsError, report["logits"] | stored)])
    sentence = f"Errors are from transformers in float64; the noise floor is its own at {report['dtype']}."
    return Part("logits", "Logits", sentence, ("", *titles(fields.LogitsError)), rows)


def _distribution(report: Report) -> Part:
    measured = report["distribution"]
    rows = _rows(fields.Distribution, measured)
    worst = measured["worst"]
    where = f"position {worst['position']} of {fields.unit(report)} {worst['window']}"
    rows.append(("the largest KL divergence is at", where + (f": {worst['text']}" if worst["text"] else "")))
    sentence = f"Of {population(report)}, in nats, ± the standard error over {fields.unit(report)}s."
    return Part("distribution", "Next-token distribution", sentence, ("", "this model"), rows)


def _perplexity(report: Report) -> Part:
    text = report["perplexity"]
    changed = change(text["reference"], text["candidate"])
    rows = [*_rows(fields.PerplexityChange, text), ("change of perplexity", changed)]
    about = f"Of the whole of {text['file']}, in windows that overlap."
    return Part("perplexity", "Perplexity", about, ("", "this model"), rows, brief=4)


def _greedy(report: Report) -> Part:
    greedy = report["greedy"]
    rows: list[tuple[Cell, ...]] = [("tokens compared", cell(greedy, "tokens_compared", count))]
    if (parting := greedy.get("first_divergence")) is None:
        return Part("greedy", "Greedy decoding", "All tokens are those of transformers.", ("", "tokens"), rows)
    rows += _rows(fields.Divergence, parting)
    sentence = f"It parts from transformers, {'within' if parting['within_noise'] else 'beyond'} the noise."
    rows += [("this model goes on", parting["candidate_text"]), ("transformers goes on", parting["reference_text"])]
    return Part("greedy", "Greedy decoding", sentence, ("", "there"), rows)


def _sites(report: Report) -> Part:
    """Norms and blocks where an error begins come first: their own is large, or it grows over the place before."""
    is_comparable = not report["center"]  # else what goes in and out of its norms is not the original's
    before, excess, rows = 1.0, dict[str, float](), dict[str, Sequence[Cell]]()
    for name, place in fields.places(report) if is_comparable else ():
        noise = place["noise"] or 0.0
        alone, ratio = (
            fields.noise_ratio(place.get(f"{kind}_error") or 0.0, noise) for kind in ("local", "propagated")
        )
        excess[name], before = max(alone, ratio / max(1.0, before)), ratio
        swapped = ("yes" if place["swapped"] else "no") if "swapped" in place else ""
        row = (name, *cells(fields.NormSiteError, _known(place)), swapped)
        rows[name] = row if has_norm(report) else row[:-1]
    heads = ["norm or block", *titles(fields.NormSiteError)]
    if has_norm(report):
        heads.append("swapped")
    most_first = sorted(rows.values(), key=lambda row: -excess[str(row[0])])
    titles_of_maps = {key: title for key, title in MAPS.items() if _is_known(report, key)}
    known = [_known(site) for site in report["norm_sites"]]
    maps = Maps(known, titles_of_maps, partial(brief, digits=2), depth_charts(report))
    about = f"{_beginnings(report)}Relative RMS errors; where they grow most comes first."
    return Part("sites", "Where it happens", about, heads, most_first, FEW, "maps", maps)


def _known(place: Report) -> Report:
    """Return the figures of a norm or block without its own error, where nobody could ask for it.

    JSON has null there, as for a number that is not finite. A norm whose own error is not finite gives an output whose
    error is not finite either.
    """
    if place.get("local_error") is None and place["propagated_error"] is not None:
        return {name: value for name, value in place.items() if name != "local_error"}
    return place


def _is_known(report: Report, error: str) -> bool:
    """Return whether a map of this error has anything to show."""
    return error != "local_error" or "norms by themselves" not in report["missing"]


def _beginnings(report: Report) -> str:
    """Return the sentence that names where errors begin; empty if none does."""
    if len(report["new_errors"]) > 1:
        return f"An error of its own begins at each of {', '.join(report['new_errors'])}. "
    off = report.get("first_off")
    return f"An error begins at {off['place']}. " if off else ""


def _gradients(report: Report) -> Part:
    rows = [(row["parameter"], *cells(fields.GradientError, row)) for row in report["gradients"]]
    sentence = f"Of the texts' loss, the worst first; above {MOST_NOISE:g} times transformers' own error is a fault."
    return Part("gradients", "Gradients", sentence, ("gradient of", *titles(fields.GradientError)), rows, FEW)


def _removal(report: Report) -> Part:
    removal = report["removal"]
    rows = [("none", "0", Number(removal["loss"], precise), "0")]
    rows += [(step["site"], *cells(fields.RemovalStep, step)) for step in removal["steps"]]
    sentence = (
        f"The least harmful site is swapped first and stays, then the next. KL divergence from the original, on "
        f"{count(removal['tokens'])} tokens, ± the standard error over {fields.unit(report)}s."
    )
    heads = ("the last site", *titles(fields.RemovalStep))
    return Part("removal", "One site after another", sentence, heads, rows, bars=1)


def _sensitivity(report: Report) -> Part:
    rows = [(row["site"], *cells(fields.SiteChange, row)) for row in report["sensitivity"]]
    sentence = "How far each site, swapped alone, moves the logits."
    return Part("sensitivity", "Which sites matter", sentence, ("site", *titles(fields.SiteChange)), rows, FEW, bars=1)


def _fit(report: Report) -> Part:
    fits = sorted(report["fit"], key=lambda site: site["after"] or 0.0)
    rows = [(site["site"], *cells(fields.SiteFit, site)) for site in fits]
    sentence = "The share of the variance of the original norm's output that this norm explains (R squared)."
    return Part("fit", "How much each site explains", sentence, ("norm site", *titles(fields.SiteFit)), rows)


def _bisect(report: Report) -> Part:
    bisect = report["bisect"]
    rows = [(", ".join(sites),) for sites in bisect["sets"]]
    sentence = (
        "These must have their own norm back for a pass; each set breaks it, and would not with any one left out. "
        f"Sets tried: {bisect['verdicts']:,}."
    )
    return Part("bisect", "Which sites break it", sentence, ("set of sites",), rows)


def _tokens(report: Report) -> Part:
    tokens = report["tokens"]
    pairs = zip(tokens["pieces"], tokens["kl"], strict=True)
    rows = [(str(i), piece, Number(kl)) for i, (piece, kl) in enumerate(pairs)]
    sentence = "KL divergence from the truth, above the token at which it was predicted."
    heads = ("position", "token", "KL, nats")
    return Part("tokens", "Along a text", sentence, heads, rows, brief=0, drawing="tokens", data=tokens)


def _first_off(report: Report) -> Part:
    """The first prompt and the first window that are off, unless a shift is all there is."""
    found = (report.get("prompt_off"), report.get("text", {}).get("first_off"))
    rows: dict[str, list[Cell]] = {}
    for column, (kind, off) in enumerate(zip((fields.PromptOff, fields.PositionOff), found, strict=True)):
        for title, cell in _rows(kind, off or {}):
            rows.setdefault(title, [None, None])[column] = cell
    shown_rows = [] if fields.is_shifted(report) else [(title, *cells) for title, cells in rows.items()]
    sentence = "Where the logits begin to be off."
    return Part("first-off", "The first text that is off", sentence, ("", "prompts", "longer text"), shown_rows, 0)


def _coverage(report: Report) -> Part:
    """Return the facts that the verdict rests on."""
    facts: dict[str, Cell] = {"texts": report["prompts"]}
    if (text := report.get("text")) is not None:
        windows = f"{text['windows']:,} window{'s' if text['windows'] > 1 else ''} of {text['window']:,}"
        facts["longer text"] = f"{text['file'] or 'built in'}: {text['tokens']:,} tokens, {windows}"
    coverage, bitwise = report["coverage"], report.get("bitwise")
    facts["positions of the context"] = f"{coverage['positions']:,} of {coverage['context']:,}"
    facts["tokens of the vocabulary"] = f"{coverage['tokens']:,} of {coverage['vocabulary']:,}"
    if "gradients" in report:
        facts["gradients"] = f"of {len(report['gradients']):,} tensors"
    elif "gradients" not in report["missing"]:
        facts["gradients"] = "not compared; --gradients compares them" if has_norm(report) else "not compared"
    if bitwise is not None:
        differs = f"differs from transformers by up to {brief(bitwise['max_abs_error'])}"
        facts["reference arithmetic"] = "equals transformers bit for bit" if bitwise["equal"] else differs
    sentence = "A fault that shows nowhere in these is not judged."
    return Part("coverage", "What was read", sentence, ("", "read"), list(facts.items()))


def _conditions(report: Report) -> Part:
    names = ("model", "against", "norm", "sites", "dtype", "attention", "device")
    if not has_norm(report):
        names = tuple(name for name in names if name not in ("norm", "sites"))
    facts = {name: report.get(name) for name in names}
    facts |= {name.replace("_", " "): version for name, version in report["versions"].items()}
    rows = [(name, ", ".join(fact) if isinstance(fact, list) else str(fact)) for name, fact in facts.items() if fact]
    return Part("conditions", "Measured on", "", ("", "value"), rows, brief=0)
