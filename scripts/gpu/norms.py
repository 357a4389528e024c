"""The norms against a plain copy, as ``minigpt bench norms`` times them, a width at a time."""

from collections.abc import Iterator
from typing import Any

import torch

from minigpt.bench.norms import CONTESTANTS, ROWS, WIDTHS, NotTimed, bench_norms

Row = dict[str, Any]
GPT2_WIDTHS = WIDTHS[:4]


def norms(results: dict[str, Any], device: torch.device, quick: bool) -> Iterator[str]:
    """Into ``results``: timings of every width, pass and number of rows, and who was absent."""
    rows, repeats = ((1, 5), 2) if quick else (ROWS["cuda"], 10)
    contestants = ("torch", "triton", "liger") if quick else CONTESTANTS
    results |= {"rows": [], "absent": {}}
    for width in (48,) if quick else WIDTHS:
        yield f"width {width}"
        told, wrong = timed(list(contestants), widths=[width], rows=rows, repeats=repeats, device=device)
        results["rows"] += told["timings"]
        results["absent"] |= told["absent"] | {f"{name} at width {width}": why for name, why in wrong.items()}
        results["dtype"] = told["dtype"]


def timed(contestants: list[str], **how: Any) -> tuple[Row, dict[str, str]]:
    """The timings of those whose results are right, and what is wrong with the others: ours is never one of these."""
    wrong: dict[str, str] = {}
    while True:
        try:
            return bench_norms(contestants=contestants, **how).to_dict(), wrong
        except NotTimed as error:
            if error.norm not in ("compiled", "liger"):
                raise
            contestants.remove(error.norm)
            wrong[error.norm] = str(error)


def goals(results: dict[str, Any]) -> Iterator[Row]:
    """What was aimed at, with the worst of what was measured."""
    timings = {(t["norm"], t["computes"], t["width"], t["rows"]): t for t in results.get("rows", ())}
    ours = {place[1:]: timing for place, timing in timings.items() if place[0] == "triton"}
    many = [t["share_of_copy"] for (computes, _, rows), t in ours.items() if computes != "backward" and rows >= 16_384]
    if many:
        yield {"goal": "triton at 0.9 of a copy's rate from 16,384 rows on, worst", "measured": min(many),
               "met": min(many) >= 0.9}  # fmt: skip
    for computes, other, least in (("forward", "torch", 1.0), ("forward", "liger", 1.0), ("backward", "torch", 1.2)):
        ratios = [
            timings[other, *place]["ms"] / timing["ms"]
            for place, timing in ours.items()
            if (other, *place) in timings and place[0] == computes and place[1] in GPT2_WIDTHS and place[2] >= 1024
        ]
        if ratios:
            yield {"goal": f"{computes} {least} times as fast as {other} at GPT-2's widths, from 1,024 rows on, worst",
                   "measured": min(ratios), "met": min(ratios) >= least}  # fmt: skip
    single = [
        timing["ms"] / timings["torch", *place]["ms"]
        for place, timing in ours.items()
        if place[2] == 1 and place[0] == "forward" and ("torch", *place) in timings
    ]
    if single:
        yield {"goal": "at one row, no slower than torch but for 5 % of noise, worst", "measured": max(single),
               "met": max(single) <= 1.05}  # fmt: skip
