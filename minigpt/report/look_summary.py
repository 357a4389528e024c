"""What each norm is given, as a table in the terminal and as a page."""

from collections.abc import Sequence

from rich.table import Table

from minigpt.report.charts import LogScale
from minigpt.report.numerals import brief, percent
from minigpt.report.page import render
from minigpt.report.parity_report import Fields

HEADS = ("norm site", "deviation", "spread", "first token", "mean's share", "largest channels", "constant explains")
QUANTITIES = {
    "deviation": ("Deviation", "the mean deviation of a row, which LayerNorm divides by, without the first token"),
    "mean_share": (
        "The mean\u2019s share",
        "the mean\u2019s part in a row\u2019s mean square, which RMSNorm leaves in",
    ),
    "unexplained": ("Lost by freezing", "the share of the output that a constant deviation does not explain"),
}


def look_rows(sites: Sequence[Fields]) -> list[tuple[str, ...]]:
    """Return the cells of the table, a row for each site."""
    return [
        (
            one.site, brief(one.deviation), brief(one.deviation_spread), brief(one.deviation_first),
            percent(one.mean_share),
            f"{', '.join(str(top.channel) for top in one.channels)}: {percent(sum(top.share for top in one.channels))}",
            percent(1 - one.unexplained),
        )
        for one in sites
    ]  # fmt: skip


def look_summary(sites: Sequence[Fields], about: str) -> Table:
    """Return the table for a terminal."""
    table = Table(*HEADS, box=None, pad_edge=False, caption=about, caption_justify="left")
    table.columns[5].no_wrap = True
    for row in look_rows(sites):
        table.add_row(*row)
    return table


def look_page(sites: Sequence[Fields], title: str, about: str) -> str:
    """Return a page with a map of the sites for each quantity, and the table."""
    scales = {name: LogScale(site[name] for site in sites) for name in QUANTITIES}
    return render(
        "look.html", title=title, about=about, report={"norm_sites": sites}, scales=scales, quantities=QUANTITIES,
        heads=HEADS, rows=look_rows(sites),
    )  # fmt: skip
