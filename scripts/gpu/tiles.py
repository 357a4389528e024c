"""The Triton norm's forward with other tiles: rows of a program, and warps that share them, a width at a time.

The best tile of a width is what ``minigpt.norms.triton.ops.tile`` should return for it.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu.models import finish
from gpu.norms import GPT2_WIDTHS
from torch import Tensor

from minigpt.norms.triton import interpreting
from minigpt.precision import full_products

ROWS = (16_384, 65_536)
TILE_ROWS = (1, 2, 4, 8)
WARPS = (1, 2, 4, 8)
EPS = 1e-5


def tiles(results: dict[str, Any], device: torch.device, quick: bool) -> Iterator[str]:
    """Add to ``results`` a row for each width, number of rows and tile: milliseconds, and share of a copy's rate."""
    if device.type != "cuda" and not interpreting():
        results["unable"] = "the Triton norm needs a CUDA device or TRITON_INTERPRET=1"
        return
    rows = results.setdefault("rows", [])
    dtype = torch.float32 if quick else torch.bfloat16
    for width in (48,) if quick else GPT2_WIDTHS:
        for count in (64,) if quick else ROWS:
            yield f"width {width}, {count:,} rows"
            x = torch.randn(count, width, device=device).to(dtype)
            rows += timed(x, 1 if quick else 20)


def timed(x: Tensor, repeats: int) -> list[dict[str, Any]]:
    """Return a row for each tile, timed in turns beside a plain copy of ``x`` (rows, width)."""
    from minigpt.norms.triton import ops

    usual = ops.tile(x.shape[1], torch.float32, ops.FORWARD_BYTES)
    choices = {usual: "usual"}
    for rows in TILE_ROWS:
        for warps in WARPS:
            choices.setdefault(ops.Tile(rows, usual.block, warps), "other")
    runs: dict[Any, Callable[[], object]] = {"copy": lambda: torch.empty_like(x).copy_(x)}
    expected = torch.nn.functional.layer_norm(x.double(), x.shape[1:], eps=EPS)
    for choice in choices:
        runs[choice] = forward_with(choice, x)
        actual: Any = runs[choice]()
        with full_products():
            error = (actual.double() - expected).abs().max().item()
        assert error < 8 * 4 * torch.finfo(x.dtype).eps, f"{choice} errs by {error}"
    seconds: dict[Any, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            finish(x.device)
            start = time.perf_counter()
            for _ in range(10):
                run()
            finish(x.device)
            seconds[name].append((time.perf_counter() - start) / 10)
    copied = statistics.median(seconds.pop("copy"))
    told = []
    for choice, taken in seconds.items():
        median = statistics.median(taken)
        row = {"width": x.shape[1], "rows": len(x), "tile_rows": choice.rows, "warps": choice.warps}
        told.append(row | {"usual": choices[choice] == "usual", "ms": 1e3 * median, "share_of_copy": copied / median})
    return told


def forward_with(choice: Any, x: Tensor) -> Callable[[], Tensor]:
    """Return a function that normalizes ``x`` by the kernel with this tile, weight 1 and bias 0."""
    from minigpt.norms.triton import ops

    count, width = x.shape
    weight, bias = torch.ones(width, device=x.device, dtype=x.dtype), torch.zeros(width, device=x.device, dtype=x.dtype)
    programs, rounds = ops._grid(count, choice, x.device)
    stats = torch.empty(2, count, device=x.device)

    def forward() -> Tensor:
        y = torch.empty_like(x)
        launch: Any = ops.forward_rows[programs,]
        launch(
            x, weight, bias, y, stats, count, rounds,
            WIDTH=width, EPS=EPS, ROWS=choice.rows, BLOCK=choice.block, num_warps=choice.warps,
        )  # fmt: skip
        return y

    return forward
