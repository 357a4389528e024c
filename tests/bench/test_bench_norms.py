"""minigpt bench norms: the figures are those of the times, and what cannot be timed is refused."""

import json
from typing import Any

import pytest

from minigpt import ConfigError, NormError
from minigpt.bench.norms import STREAMS, bench_norms
from minigpt.cli import app

FEW: dict[str, Any] = dict(widths=[48], rows=[1, 5], repeats=2, device="cpu")


def test_every_norm_at_every_shape_and_pass() -> None:
    bench = bench_norms(["fused", "rms"], **FEW)
    shapes = [(t["norm"], t["width"], t["rows"], t["computes"]) for t in bench["timings"]]
    assert sorted(shapes) == sorted((n, 48, r, p) for n in ("fused", "rms") for r in (1, 5) for p in STREAMS)
    for timing in bench["timings"]:
        moved = STREAMS[timing["computes"]] * timing["rows"] * 48 * 4
        assert timing["gb_per_s"] == pytest.approx(moved / timing["ms"] / 1e6)
        assert timing["share_of_copy"] > 0
    assert (bench["device"], bench["dtype"]) == ("cpu", "float32")


def test_what_cannot_be_measured_is_refused() -> None:
    wrong: dict[str, Any]
    for wrong in ({"widths": [0]}, {"rows": [2**31]}, {"repeats": 0}, {"device": "meta"}):
        with pytest.raises(ConfigError):
            bench_norms(["fused"], **FEW | wrong)
    with pytest.raises(NormError, match="unknown norm"):
        bench_norms(["no_such_norm"], **FEW)


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--width", "48", "--rows", "3", "--repeats", "2", "--device", "cpu"]
    words = ["bench", "norms", "--norm", "textbook", *shape]
    app(words, standalone_mode=False)
    assert "backward" in capsys.readouterr().out
    app([*words, "--json", "-"], standalone_mode=False)
    assert len(json.loads(capsys.readouterr().out)["timings"]) == len(STREAMS)
