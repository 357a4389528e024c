"""The verdict of ``minigpt norms --check``: one screen, every case, a page, and the exit status."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sabotages
from command_line import Run
from rich.console import Console

from minigpt.conformance import ConformanceReport, check_norm
from minigpt.conformance.summary import conformance_page, conformance_summary

TUTORIAL = """
import torch
from torch import nn

class Tutorial(nn.Module):
    def __init__(self, features, eps=1e-5):
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        var = x.var(-1, keepdim=True, unbiased=False)
        return self.gamma * (x - mean) / torch.sqrt(var + self.eps) + self.beta
"""
Check = Callable[..., tuple[int, str]]


def printed(report: ConformanceReport, dtype: str = "float32") -> list[str]:
    console = Console(width=200)
    with console.capture() as caught:
        console.print(conformance_summary(report, dtype))
    return caught.get().splitlines()


def test_a_dtype_that_was_not_judged_is_named() -> None:
    lines = printed(check_norm(sabotages.NoFloat64, device="cpu", cases="values", seed=0), "float64")
    assert lines[0] == "NOT JUDGED  Not judged as a LayerNorm: NoFloat64 at float64 on cpu"
    assert any(line.startswith("float64   not judged: NoFloat64, given ") for line in lines)


def test_mistakes_at_the_dtype_that_is_judged_come_first() -> None:
    report = check_norm(sabotages.StatisticsOfTheInput, device="cpu", cases="ordinary rows", seed=0)
    for dtype in ("bfloat16", "float16"):
        first, _second = (line for line in printed(report, dtype) if " are rounded to " in line)
        assert first.endswith(f"input: mean and variance are rounded to {dtype}")
        assert first.strip() in conformance_page(report, dtype).split('<p class="reason">')[1]


def test_the_page_escapes_and_lists_every_case() -> None:
    report = check_norm(sabotages.DividesByNMinusOne, device="cpu", cases="values", seed=0)
    page = conformance_page(report)
    assert "the variance divided by n - 1" in page
    failing = page[page.index('id="FAIL-values"') : page.index('id="pass-values"')]
    assert all(case.name.replace("&", "&amp;") in failing for case in report.failures)
    assert all(case.name.replace("&", "&amp;") in page for case in report.cases)


@pytest.fixture
def check(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Run ``minigpt norms --check`` on the formula of every tutorial, with some of the cases, once as each kind."""
    (tmp_path / "tutorial.py").write_text(TUTORIAL)
    reports: dict[str | None, ConformanceReport] = {}

    def once(norm: str, *, kind: str | None, **how: Any) -> ConformanceReport:
        if kind not in reports:
            reports[kind] = check_norm(norm, kind=kind, cases=["values"], **how)
        return reports[kind]

    monkeypatch.setattr("minigpt.conformance.check_norm", once)

    def check(*words: object) -> tuple[int, str]:
        return run("norms", "--check", f"{tmp_path / 'tutorial.py'}:Tutorial", "--device", "cpu", *words)[:2]

    return check


def test_what_is_printed_and_written(check: Check, tmp_path: Path) -> None:
    status, out = check("--html", tmp_path / "kit.html")
    assert status == 0
    assert out.startswith("PASS")
    assert "it computes in too few bits for float16 input" in out
    assert re.search(r"\d+ of \d+ +(bfloat16, )?float16  +\w+", out), out
    assert "…" not in out, "a pipe gets whole lines"
    assert "<h1>" in (tmp_path / "kit.html").read_text()
    assert [check("--dtype", dtype)[0] for dtype in ("float64", "float16", "bfloat16")] == [0, 1, 1]
    assert len(check("--all")[1].splitlines()) > 30
    status, out = check("--as", "rms_norm", "--html", tmp_path / "kit.html")
    assert (status, out.startswith("FAIL  It is not an RMSNorm: ")) == (1, True)
    assert "the mean subtracted (a LayerNorm)" in out
    assert "It is not an RMSNorm" in (tmp_path / "kit.html").read_text()
    fields = json.loads(check("--json")[1])
    assert (fields["verdict"], fields["dtypes"]["float32"], fields["dtypes"]["float16"]) == ("fail", True, False)
