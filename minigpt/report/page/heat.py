"""The norm sites as a map: layers across, ln_1 over ln_2, what stands in no layer apart."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from minigpt.judge.parity_report import MOST_NOISE
from minigpt.report.numerals import brief, coarse
from minigpt.report.page.figures import LogScale, figure
from minigpt.report.page.markup import Child, Html, element, fragment
from minigpt.report.page.tables import folded, scrolling, wide
from minigpt.report.reading import Reading

OWN = "Own error: its output, given the reference\u2019s input"
PROPAGATED = "Propagated error: its output in the running model"

MOST_ACROSS = 12  # blocks in one row of the map; a deeper model takes several

_IN_BLOCK = re.compile(r"h\.(\d+)(?:\.(.+))?")
_SWAPPED = element("span", "\u25c6", class_="mark swapped", role="img", aria_label="swapped")
_OVER = element("span", "\u25b2", class_="mark", role="img", aria_label="beyond the noise")


class Place(NamedTuple):
    """Where in the network a norm or a block stands; ``block`` is None outside all blocks."""

    block: int | None
    name: str


def place(site: str) -> Place:
    found = _IN_BLOCK.fullmatch(site)
    return Place(int(found[1]), found[2] or "") if found else Place(None, site)


def heat_scale(readings: Sequence[Reading]) -> LogScale:
    """One scale for both maps of all reports, so that they can be compared."""
    keys = ("local_error", "propagated_error")
    return LogScale(site[key].number for reading in readings for site in reading["norm_sites"] for key in keys)


def heat_maps(reading: Reading, scale: LogScale) -> Html | None:
    """The two maps of one report, of own and of propagated errors; None where it has no sites."""
    sites = list(reading["norm_sites"])
    if not sites:
        return None
    which = f" ({reading.label})" if reading.label else ""
    own = _map(f"Own error of each norm{which}", OWN, "local_error", sites, scale)
    propagated = _map(f"Error of each norm\u2019s output{which}", PROPAGATED, "propagated_error", sites, scale)
    return fragment(element("div", own, propagated, class_="maps"), folded("Every site in figures", _listed(sites)))


def heat_key(readings: Sequence[Reading], scale: LogScale) -> Html:
    """What the shades and the marks mean."""
    noise_known = any(site["noise"] for reading in readings for site in reading["norm_sites"])
    ramp = element("span", class_="ramp", aria_hidden="true")
    over = element("span", _OVER, f" over {MOST_NOISE:g}\u00d7 transformers\u2019 own error there")
    return element(
        "p",
        element("span", coarse(scale.low), ramp, coarse(scale.high)),
        element("span", _SWAPPED, " swapped"),
        over if noise_known else None,
        class_="legend",
    )


def _map(label: str, title: str, quantity: str, sites: list[Reading], scale: LogScale) -> Html:
    at = {place(site["site"].text): site for site in sites}
    names = sorted({where.name for where in at if where.block is not None}) or [""]
    apart = [where for where in at if where.block is None]
    bands = _bands(sorted({where.block for where in at if where.block is not None}))
    draw = partial(_cell, quantity=quantity, scale=scale)
    rows = [_band(names, band, apart if band is bands[-1] else [], at, draw) for band in bands]
    bodies = [element("tbody", cells, role="rowgroup") for cells in rows]
    caption = element("caption", label, class_="unseen")
    return element(
        "figure",
        element("figcaption", title),
        scrolling(label, element("table", caption, bodies, class_="heat", role="table")),
    )


def _bands(blocks: list[int]) -> list[list[int | None]]:
    """The blocks in rows of equal length that fit the page, the last filled up with None; at least one row."""
    rows = math.ceil(len(blocks) / MOST_ACROSS) or 1
    length = math.ceil(len(blocks) / rows)
    filled = [*blocks, *[None] * (rows * length - len(blocks))]
    return [filled[i * length : (i + 1) * length] for i in range(rows)]


def _band(
    names: list[str], blocks: list[int | None], apart: list[Place], at: dict[Place, Reading], draw: Callable[..., Html]
) -> Iterator[Html]:
    """A row of block numbers, then a row for each norm of a block; what stands apart spans all of these."""
    head = partial(element, "th", scope="col", role="columnheader")
    yield _row(element("td", role="cell"), map(head, blocks), [head(where.name, class_="apart") for where in apart])
    for i, name in enumerate(names):
        cells = [draw(at.get(Place(block, name)) if block is not None else None) for block in blocks]
        tall = [draw(at[where], class_="apart", rowspan=len(names)) for where in apart] if i == 0 else None
        yield _row(element("th", name, scope="row", role="rowheader"), cells, tall)


def _row(*cells: Child) -> Html:
    return element("tr", *cells, role="row")


def _cell(site: Reading | None, *, quantity: str, scale: LogScale, **attributes: object) -> Html:
    if site is None:
        return element("td", role="cell", class_="empty")
    shade = scale.place(site[quantity].number)
    marks = [_SWAPPED if site["swapped"].value else None, _OVER if _over(site, quantity) else None]
    return element(
        "td",
        figure(site[quantity], coarse),
        element("span", marks, class_="marks"),
        style=f"--shade:{shade:.3f}",
        title=_told(site, quantity),
        role="cell",
        **attributes,
    )


def _over(site: Reading, quantity: str) -> bool:
    noise, error = site["noise"].number, site["propagated_error"].number
    return quantity == "propagated_error" and noise is not None and (error is None or error > MOST_NOISE * noise)


def _told(site: Reading, quantity: str) -> str:
    stem = quantity.removesuffix("_error")
    parts = [(None, quantity), ("first token", f"{stem}_first"), ("other tokens", f"{stem}_rest")]
    if quantity == "propagated_error":
        parts.append(("transformers itself", "noise"))
    told = [
        f"{what} {brief(site[key].number)}" if what else brief(site[key].number) for what, key in parts if key in site
    ]
    return f"{site['site'].text}: {'; '.join(told)}{'; swapped' if site['swapped'].value else ''}"


_COLUMNS = {
    "local_error": "own error", "local_first": "first token", "local_rest": "other tokens",
    "propagated_error": "propagated error", "propagated_first": "first token", "propagated_rest": "other tokens",
    "noise": "transformers itself",
}  # fmt: skip


def _listed(sites: list[Reading]) -> Html:
    columns = [key for key in _COLUMNS if any(key in site for site in sites)]
    rows: list[list[Child]] = [
        [site["site"].text, *(figure(site[key]) for key in columns), "yes" if site["swapped"].value else "no"]
        for site in sites
    ]
    head = ["site", *(_COLUMNS[key] for key in columns), "swapped"]
    return wide("Every norm site in figures", head, rows)
