"""The norms against a plain copy, as ``minigpt bench norms`` times them, a width at a time."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from gpu.models import known_norms

from minigpt.bench.norms import ROWS, WIDTHS, bench_norms

Row = dict[str, Any]
LIGER = "liger_kernel.transformers:LigerLayerNorm"


def norms(results: dict[str, Any], device: torch.device, quick: bool) -> Iterator[str]:
    """Into ``results``: timings of every width, pass and number of rows."""
    rows, repeats = ((1, 5), 2) if quick else (ROWS["cuda"], 10)
    has_liger = device.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None
    names = [*known_norms(("fused", "triton"), device), *[LIGER] * has_liger]
    results["rows"] = []
    for width in (48,) if quick else WIDTHS:
        yield f"width {width}"
        told = bench_norms(names, widths=[width], rows=rows, repeats=repeats, device=device)
        results["rows"] += told["timings"]
        results["dtype"] = told["dtype"]


def goals(results: dict[str, Any]) -> Iterator[Row]:
    """What was aimed at, with the worst of what was measured."""
    timings = {(t["norm"], t["computes"], t["width"], t["rows"]): t for t in results.get("rows", ())}
    ours = {place[1:]: timing for place, timing in timings.items() if place[0] == "triton"}
    many = [t["share_of_copy"] for (computes, _, rows), t in ours.items() if computes != "backward" and rows >= 16_384]
    if many:
        yield {"goal": "triton at 0.9 of a copy's rate from 16,384 rows on, worst", "measured": min(many),
               "met": min(many) >= 0.9}  # fmt: skip
    for computes, other, least in (("forward", "fused", 1.0), ("forward", LIGER, 1.0), ("backward", "fused", 1.2)):
        ratios = [
            timings[other, *place]["ms"] / timing["ms"]
            for place, timing in ours.items()
            if (other, *place) in timings and place[0] == computes and place[2] >= 1024
        ]
        if ratios:
            yield {"goal": f"{computes} {least} times as fast as {other} at GPT-2's widths, from 1,024 rows on, worst",
                   "measured": min(ratios), "met": min(ratios) >= least}  # fmt: skip
