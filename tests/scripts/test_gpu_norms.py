"""The norms' timings in scripts/gpu: the figures are those of the times."""

import pytest
import torch
from gpu.norms import STREAMS, timed


def test_every_norm_at_every_shape_and_pass() -> None:
    timings = timed(["fused", "rms"], 48, [1, 5], torch.device("cpu"), torch.float32, repeats=2)
    shapes = [(t["norm"], t["width"], t["rows"], t["computes"]) for t in timings]
    assert sorted(shapes) == sorted((n, 48, r, p) for n in ("fused", "rms") for r in (1, 5) for p in STREAMS)
    for timing in timings:
        moved = STREAMS[timing["computes"]] * timing["rows"] * 48 * 4
        assert timing["gb_per_s"] == pytest.approx(moved / timing["ms"] / 1e6)
        assert timing["share_of_copy"] > 0
