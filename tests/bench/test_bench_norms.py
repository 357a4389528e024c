"""minigpt bench norms: what it says it measured, and what it refuses to time."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from minigpt import ConfigError, NormError
from minigpt.bench.norms import STREAMS, bench_norms
from minigpt.cli import app

pytestmark = pytest.mark.thorough

FEW: dict[str, Any] = dict(widths=[48], rows=[1, 5], repeats=2, device="cpu")


def test_every_norm_at_every_shape_and_pass() -> None:
    bench = bench_norms(["fused", "rms"], **FEW)
    shapes = [(t["norm"], t["width"], t["rows"], t["computes"]) for t in bench["timings"]]
    assert sorted(shapes) == sorted((n, 48, r, p) for n in ("fused", "rms") for r in (1, 5) for p in STREAMS)
    for timing in bench["timings"]:
        moved = STREAMS[timing["computes"]] * timing["rows"] * 48 * 4
        assert timing["gb_per_s"] == pytest.approx(moved / timing["ms"] / 1e6)
        assert timing["share_of_copy"] > 0
        assert timing["wrong"] is None
    assert (bench["device"], bench["dtype"]) == ("cpu", "float32")


WRONG = """
import minigpt, torch
import torch.nn.functional as F

class Short(minigpt.LayerNorm):
    def forward(self, x):
        y = F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        return torch.cat([y[:4], 0 * y[4:]]) if len(y) > 4 else y

class Unshifted(minigpt.LayerNorm):
    def add_norm(self, residual, delta):
        total = residual + delta
        return total, F.layer_norm(total, total.shape[-1:], self.weight, None, self.eps)

class Detached(minigpt.LayerNorm):
    def standardize(self, x):
        return (x - x.mean(-1, keepdim=True).detach()) / (x.var(-1, correction=0, keepdim=True) + self.eps).sqrt()
"""


@pytest.mark.parametrize(
    ("name", "passes", "place"),
    [
        ("Short", {"forward", "backward", "add_norm"}, "the result is off by .* (row 4 (all 0))"),
        ("Unshifted", {"add_norm"}, "its norm is off by"), ("Detached", {"backward"}, "input is off by"),
    ],
)  # fmt: skip
def test_a_wrong_kernel_is_named(name: str, passes: set[str], place: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    bench = bench_norms([f"{tmp_path / 'wrong.py'}:{name}", "fused"], **FEW)
    wrong = [timing for timing in bench["timings"] if timing["wrong"]]
    assert {timing["computes"] for timing in wrong} == passes
    assert all(timing["norm"].endswith(name) for timing in wrong)
    begin, _, end = place.partition(" .* ")
    assert wrong[0]["wrong"].startswith(begin), wrong[0]
    assert wrong[0]["wrong"].endswith(end), wrong[0]


def test_a_wrong_kernel_is_status_1(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    words = ["bench", "norms", "--norm", f"{tmp_path / 'wrong.py'}:Short", "--width", "48", "--rows", "5"]
    ended = CliRunner().invoke(app, [*words, "--repeats", "1", "--device", "cpu"])
    assert ended.exit_code == 1
    assert "WRONG  " in ended.stdout


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_right_norms_are_right_at_every_dtype(dtype: str) -> None:
    bench = bench_norms(["fused", "textbook"], **FEW | {"rows": [33, 300], "dtype": dtype})
    assert {timing["wrong"] for timing in bench["timings"]} == {None}


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
    assert "add_norm" in capsys.readouterr().out
    app([*words, "--json", "-"], standalone_mode=False)
    assert len(json.loads(capsys.readouterr().out)["timings"]) == len(STREAMS)
