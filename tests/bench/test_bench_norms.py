"""minigpt bench norms: what it says it measured, and what it refuses to time."""

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console
from torch import Tensor
from torch._dynamo.utils import counters

from minigpt import ConfigError, LayerNorm, MiniGPTError, NormError, cli
from minigpt.bench.norms import PASSES, STREAMS, bench_norms
from minigpt.bench.norms_views import norms_plot, norms_table, require_plot

FEW = dict(widths=[48], rows=[1, 5], repeats=2, device="cpu")


def test_every_contestant_at_every_shape_and_pass() -> None:
    bench = bench_norms(contestants=["torch", "textbook", "liger"], **FEW).to_dict()
    assert "liger" in bench["absent"]
    shapes = [(t["norm"], t["width"], t["rows"], t["computes"]) for t in bench["timings"]]
    assert sorted(shapes) == sorted((n, 48, r, p) for n in ("torch", "textbook") for r in (1, 5) for p in PASSES)
    for timing in bench["timings"]:
        assert 0 < timing["ms_p20"] <= timing["ms"] <= timing["ms_p80"]
        moved = STREAMS[timing["computes"]] * timing["rows"] * 48 * 4
        assert timing["gb_per_s"] == pytest.approx(moved / timing["ms"] / 1e6)
        assert timing["share_of_copy"] > 0
        assert timing["call_ms"] == timing["ms"], "a CPU is its own caller"
    assert (bench["device"], bench["dtype"]) == ("cpu", "float32")
    json.dumps(bench, allow_nan=False)


class Shifted(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.01


class WrongGradient(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 0.5 + x.detach() * 0.5)


@pytest.mark.parametrize(("wrong", "computes"), [(Shifted, "forward"), (WrongGradient, "backward")])
def test_wrong_results_are_not_timed(wrong: type, computes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minigpt.bench.norm_contestants.Compiled", wrong)
    with pytest.raises(NormError, match=f"compiled is not timed: its {computes} is off by"):
        bench_norms(contestants=["torch", "compiled"], **FEW)


def test_what_cannot_be_measured_is_refused() -> None:
    for wrong in ({"widths": [0]}, {"rows": []}, {"repeats": 1}, {"passes": ["sideways"]}, {"device": "meta"}):
        with pytest.raises(ConfigError):
            bench_norms(contestants=["torch"], **FEW | wrong)
    with pytest.raises(NormError, match="unknown norm"):
        bench_norms(contestants=["no_such_norm"], **FEW)
    with pytest.raises(NormError, match="nothing to time: liger"):
        bench_norms(contestants=["liger"], **FEW)


def test_table_and_plot(tmp_path: Path) -> None:
    bench = bench_norms(contestants=["torch"], **FEW).to_dict()
    console = Console(width=200, record=True, file=None, quiet=False)
    with console.capture() as caught:
        console.print(norms_table(bench))
    assert "add_norm" in caught.get()
    assert "GB/s" in caught.get()
    pytest.importorskip("matplotlib")
    norms_plot(bench, tmp_path / "norms.svg")
    assert "share of a copy" in (tmp_path / "norms.svg").read_text()
    for file in (tmp_path / "norms.xyz", tmp_path / "absent" / "norms.png"):
        with pytest.raises(MiniGPTError, match="cannot draw"):
            require_plot(file)


def test_on_the_command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = "minigpt bench norms --norm torch --width 48 --rows 3 --repeats 2 --device cpu --json -"
    monkeypatch.setattr(sys, "argv", words.split())
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert len(json.loads(capsys.readouterr().out)["timings"]) == len(PASSES)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_the_librarys_norm_is_right_enough_in_every_dtype(dtype: str) -> None:
    found = bench_norms(contestants=["torch"], **FEW | {"widths": [768], "rows": [1024], "dtype": dtype})
    assert len(found.timings) == len(PASSES)


@pytest.mark.usefixtures("unchecked")
def test_the_compiled_norm_is_compiled_at_every_shape_that_is_timed() -> None:
    """Once for a single row and once for more, with gradients and without: four times, whatever the rows."""
    how = FEW | dict(rows=[1, 2, 3, 4, 5, 7, 9, 11, 13], passes=["forward", "backward"])
    counters.clear()
    bench = bench_norms(contestants=["compiled"], **how)
    assert len(bench.timings) == 18
    assert 2 <= counters["stats"]["unique_graphs"] <= 5


def test_inputs_take_turns_until_no_cache_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()

    class Watched(LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 5:
                seen.add(x.data_ptr())
            return super().forward(x)

    monkeypatch.setattr("minigpt.bench.norm_contestants.Compiled", Watched)
    monkeypatch.setattr("minigpt.bench.norms.CHECKED", {"cpu": 1})
    for cold, inputs in ((2**12, 5), (2**20, 16), (1, 1)):
        seen.clear()
        monkeypatch.setattr("minigpt.bench.norms.COLD", cold)
        bench_norms(contestants=["compiled"], passes=["forward"], **FEW | {"rows": [5], "repeats": 16})
        assert len(seen) == inputs


@pytest.mark.gpu
@pytest.mark.usefixtures("unchecked")  # torch.compile would trace the shape checks as well
def test_on_cuda() -> None:
    bench = bench_norms(widths=[768], rows=[1, 16_384], repeats=3, device="cuda")
    assert {timing.norm for timing in bench.timings} >= {"torch", "compiled", "triton"}
    for timing in bench.timings:
        assert timing.ms > 0
        assert timing.call_ms > 0
        assert timing.rows == 1 or timing.share_of_copy > 0.1
