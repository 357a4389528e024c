"""What is larger than what: the norm among ordinary differences, and the sites, as bars on a logarithmic scale."""

import math
from collections.abc import Sequence

from minigpt.report.numerals import brief, times
from minigpt.report.page.figures import LogScale, figure
from minigpt.report.page.markup import Child, Html, element, fragment
from minigpt.report.page.tables import absent, folded, table
from minigpt.report.reading import Reading

MOST_RANKED = 10  # sites shown before the rest is folded away


def difference_scale(readings: Sequence[Reading]) -> LogScale:
    """One scale for the differences of all reports."""
    ordinary = [line["rms_error"].number for reading in readings for line in reading["noise"]]
    return LogScale([*ordinary, *map(own_error, readings)])


def differences(reading: Reading, scale: LogScale) -> Html | None:
    """The ordinary differences with this norm among them, smallest first; None where they were not measured."""
    if not reading["noise"]:
        return None
    rows: list[tuple[float, list[Child]]] = []
    own = own_error(reading)
    if own is not None:
        rows.append((own, [_barred(element("strong", "this norm"), scale, own, "own"), brief(own), None]))
    for line in reading["noise"]:
        error, share = line["rms_error"].number, line["share"]
        shared = figure(share) if share else "no difference" if error == 0 else absent()
        cells = [_barred(line["difference"].text, scale, error), figure(line["rms_error"]), shared]
        rows.append((math.inf if error is None else error, cells))
    rows.sort(key=lambda row: row[0])
    head = ["", "RMS error", "this norm\u2019s share"]
    return table("Beside ordinary differences", head, [cells for _, cells in rows], "figures bars")


def own_error(reading: Reading) -> float | None:
    """The candidate's error on the text that the differences were measured on, as their shares tell it."""
    known = ((line["rms_error"].number, line["share"].number) for line in reading["noise"])
    return next((error * share for error, share in known if error is not None and share is not None), None)


def sensitivity_scale(readings: Sequence[Reading]) -> LogScale:
    """One scale for the sites of all reports."""
    return LogScale(site["rms_error"].number for reading in readings for site in reading["sensitivity"])


def sensitivities(reading: Reading, scale: LogScale) -> Html | None:
    """The sites, most sensitive first, all but the first few folded away; None where they were not ranked."""
    ranked: list[list[Child]] = [
        [
            _barred(site["site"].text, scale, site["rms_error"].number),
            figure(site["rms_error"]),
            figure(site["ratio"], times),
        ]
        for site in reading["sensitivity"]
    ]
    if not ranked:
        return None
    title, head = "Sites by sensitivity", ["site", "RMS change", "of the noise floor"]
    rest = ranked[MOST_RANKED:]
    return fragment(
        table(title, head, ranked[:MOST_RANKED], "figures bars"),
        folded(f"The other {len(rest)}", table(title, head, rest, "figures bars")) if rest else None,
    )


def _barred(name: Child, scale: LogScale, x: float | None, class_: str | None = None) -> Html:
    """A name over a bar; the smallest of the scale is a short one, zero is none."""
    length = 0.0 if x == 0 else 0.04 + 0.96 * scale.place(x)
    bar = element("span", class_="bar", style=f"--part:{length:.4f}", aria_hidden="true")
    return element("span", name, bar, class_=class_)
