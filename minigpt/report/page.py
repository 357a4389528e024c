"""Parity reports as one self-contained HTML page, filled from the Jinja2 templates beside this file."""

import functools
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from minigpt.judge.parity_report import MOST_NOISE
from minigpt.measure import numerals
from minigpt.report.charts import LogScale, Site, depth_charts
from minigpt.report.reading import Reading, caution, outcome_of, readings_of

SIGNS = {"PASS": "✓", "FAIL": "✗", "DIFFERENT": "≠"}
_CONTROLS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"} | {0x7F: "\u2421"}
MOST_ACROSS = 12  # blocks in one row of the map of sites; a deeper model takes several rows


def report_page(*reports: dict[str, Any]) -> str:
    """Return an HTML page with these reports, which needs no network and no script.

    Args:
        reports: as ``ParityReport.to_dict`` returns them, or read from JSON files. Fields that one lacks are left out.

    Raises:
        MiniGPTError: if one of them is not a parity report.
    """
    readings = readings_of(reports)
    return render(
        "parity.html",
        title=_title(readings),
        readings=readings,
        caution=caution(readings),
        depth_charts=depth_charts(readings),
        scales={
            "noise": LogScale(x for r in readings for x in (_own_error(r), *_numbers(r["noise"], "rms_error"))),
            "sites": LogScale(
                x for r in readings for key in ("local_error", "propagated_error")
                for x in _numbers(r["norm_sites"], key)
            ),
            "tokens": LogScale(kl.number for r in readings for kl in r["tokens.kl"]).decades,
            "removal": LogScale(x for r in readings for x in _numbers(r["removal.steps"], "kl_mean")),
            "sensitivity": LogScale(x for r in readings for x in _numbers(r["sensitivity"], "rms_error")),
        },
    )  # fmt: skip


def render(template: str, **context: object) -> str:
    """Fill one of the templates. Text is escaped, unless it is ``Markup`` already."""
    return _environment().get_template(template).render(context)


def printable(text: object) -> str:
    """Make control characters and lone surrogates visible, which no page can carry."""
    return str(text).translate(_CONTROLS).encode("utf-8", "replace").decode("utf-8")


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("minigpt.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else "" if value is None else printable(value),
    )
    environment.filters |= {
        "columns": lambda members, named: [(key, name) for key, name in named if any(key in one for one in members)],
        "having": lambda readings, path: [reading for reading in readings if reading[path]],
        "naming": lambda readings, path: [reading for reading in readings if path in reading],
        "nonnegative": lambda x: max(0.0, x),
        "repr": repr,
        "texts": lambda members: [member.text for member in members],
        "visible": visible,
    }
    environment.globals |= {name: getattr(numerals, name) for name in ("brief", "count", "percent", "precise", "times")}
    environment.globals |= {
        "MOST_NOISE": MOST_NOISE,
        "at_parting": at_parting,
        "change": lambda before, after: numerals.change(before.number, after.number),
        "conditions": _conditions,
        "differences": _differences,
        "heading": _heading,
        "headings": lambda readings, alone: [_heading(reading) or alone for reading in readings],
        "is_over_noise": _is_over_noise,
        "noise_is_known": lambda readings: any(_numbers(reading["norm_sites"], "noise") for reading in readings),
        "coarse": lambda x: numerals.brief(x, 2),
        "plain_number": lambda x: f"{x:.0f}",
        "ratio": _ratio,
        "site_map": _site_map,
        "told": _told,
        "verdict_of": verdict_of,
        "zip": zip,
    }
    return environment


class Verdict(NamedTuple):
    """A verdict as the page shows it."""

    word: str
    sign: str
    heading: str
    reasons: list[str]

    @property
    def kind(self) -> str:
        """Its CSS class."""
        return self.word.lower()


def verdict_of(reading: Reading) -> Verdict:
    """The verdict, and the reasons for it."""
    word, has_budget = outcome_of(reading), bool(reading["budget"])
    headings = {
        "PASS": "The budget is kept" if has_budget else "Parity holds",
        "FAIL": "The budget is not kept" if has_budget else "Parity does not hold",
        "DIFFERENT": "A different model",
    }
    reasons = [reason.text for reason in reading["reasons"]] or [_why_it_passed(reading, has_budget)]
    return Verdict(word, SIGNS[word], headings[word], reasons)


def _why_it_passed(reading: Reading, has_budget: bool) -> str:
    if has_budget:
        return "Every limit of the budget is kept."
    ratio, compared = reading["logits.ratio"].number, reading["greedy.tokens_compared"].number
    multiple = "not known as a multiple of" if ratio is None else f"{numerals.brief(ratio)} times"
    error = f"The error of its logits is {multiple} that of transformers itself at {reading['dtype'].text}"
    if not compared:
        return f"{error}."
    if reading["greedy.first_divergence"]:
        return f"{error}, and greedy decoding parts only where noise alone could part it."
    return f"{error}, and all {numerals.count(compared)} greedy tokens are the same."


def _title(readings: Sequence[Reading]) -> str:
    if len(readings) == 1:
        (one,) = readings
        return f"{verdict_of(one).heading}: {one['norm'].text} in {one['model'].text}"
    return f"{len(readings)} reports, side by side"


def _heading(reading: Reading) -> str:
    """The head of a report's column; empty if the report stands alone."""
    return f"{reading.label} · {reading['norm'].text}" if reading.label else ""


def _numbers(members: Iterable[Reading], key: str) -> list[float]:
    return [x for member in members if (x := member[key].number) is not None]


def _ratio(readings: Sequence[Reading], path: str) -> str | None:
    """The second report's figure over the first's, if both are known."""
    a, b = (reading[path].number for reading in readings)
    return numerals.times(b / a) if a and b is not None else None


def _conditions(readings: Sequence[Reading]) -> list[tuple[str, list[str]]]:
    """What each report was measured on, a line for each condition that one of them names."""
    names = ["model", "against", "norm", "sites", "dtype", "attention", "device", "prompts"]
    names += dict.fromkeys(f"versions.{name}" for reading in readings for name in reading["versions"].names)
    facts = {name.removeprefix("versions.").replace("_", " "): [r[name].text for r in readings] for name in names}
    return [(name, values) for name, values in facts.items() if any(values)]


# Ordinary differences


class Difference(NamedTuple):
    """A bar among the ordinary differences; ``line`` is None for the norm itself."""

    error: float | None
    line: Reading | None


def _differences(reading: Reading) -> list[Difference]:
    """The ordinary differences with this norm among them, smallest first."""
    found = [Difference(line["rms_error"].number, line) for line in reading["noise"]]
    if (own := _own_error(reading)) is not None:
        found.insert(0, Difference(own, None))
    return sorted(found, key=lambda difference: math.inf if difference.error is None else difference.error)


def _own_error(reading: Reading) -> float | None:
    """The candidate's error on the text that the differences were measured on, computed from their shares."""
    known = ((line["rms_error"].number, line["share"].number) for line in reading["noise"])
    return next((error * share for error, share in known if error is not None and share is not None), None)


# The map of sites


class SiteMap(NamedTuple):
    """The norm sites in the rows and columns of the map."""

    names: list[str]
    bands: list[list[int | None]]  # the blocks in rows of equal length, the last filled up with None
    apart: list[str]
    at: dict[Site, Reading]


def _site_map(reading: Reading) -> SiteMap | None:
    at = {Site.of(site["site"].text): site for site in reading["norm_sites"]}
    if not at:
        return None
    blocks = sorted({site.block for site in at if site.block is not None})
    length = math.ceil(len(blocks) / (math.ceil(len(blocks) / MOST_ACROSS) or 1)) or 1
    bands = [[*blocks[i : i + length], *[None] * (i + length - len(blocks))] for i in range(0, len(blocks), length)]
    return SiteMap(
        names=sorted({site.name for site in at if site.block is not None}) or [""],
        bands=bands or [[]],
        apart=[site.name for site in at if site.block is None],
        at=at,
    )


def _is_over_noise(site: Reading) -> bool:
    noise, error = site["noise"].number, site["propagated_error"].number
    return noise is not None and (error is None or error > MOST_NOISE * noise)


def _told(site: Reading, quantity: str) -> str:
    """A cell of the map in words."""
    stem = quantity.removesuffix("_error")
    parts = {quantity: "", f"{stem}_first": "first token ", f"{stem}_rest": "other tokens "}
    if quantity == "propagated_error":
        parts["noise"] = "transformers itself "
    figures = [f"{name}{numerals.brief(site[key].number)}" for key, name in parts.items() if key in site]
    return f"{site['site'].text}: {'; '.join(figures)}{'; swapped' if site['swapped'].value else ''}"


# Texts


def visible(piece: str) -> str:
    """Show line breaks and tabs as symbols."""
    return piece.replace("\r", "␍").replace("\n", "↵").replace("\t", "⇥")


def at_parting(text: str, other: str) -> tuple[str, str, str]:
    """Split a text into what it shares with another, the word in which they part, and the rest."""
    common = parting_point(text, other)
    word = re.match(r"\s*\S*", text[common:])
    end = common + (len(word[0]) if word else 0)
    return text[:common], text[common:end], text[end:]


def parting_point(a: str, b: str) -> int:
    """The length of the text the two share, up to the beginning of the word in which they part."""
    shared = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    within_word = any(not text[shared].isspace() for text in (a, b) if shared < len(text))
    while within_word and shared > 0 and not a[shared - 1].isspace():
        shared -= 1
    return shared
