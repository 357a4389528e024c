"""The norms against a plain copy, as ``minigpt bench norms`` times them, a width at a time."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from gpu.models import known_norms

from minigpt.bench.norms import GPT2_WIDTHS, USUAL_ROWS, bench_norms

LIGER = "liger_kernel.transformers:LigerLayerNorm"


def norms(results: dict[str, Any], device: torch.device, quick: bool) -> Iterator[str]:
    """Into ``results``: timings of every width, pass and number of rows."""
    rows, repeats = ((1, 5), 2) if quick else (USUAL_ROWS["cuda"], 10)
    has_liger = device.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None
    names = [*known_norms(("fused", "triton"), device), *[LIGER] * has_liger]
    results["rows"] = []
    for width in (48,) if quick else GPT2_WIDTHS:
        yield f"width {width}"
        told = bench_norms(names, widths=[width], rows=rows, repeats=repeats, device=device)
        results["rows"] += told["timings"]
        results["dtype"] = told["dtype"]
