"""scripts/gpu/suite.py: every part of it on the CPU, what it keeps of a run cut short, and all of it on a GPU."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer

from minigpt import norms
from minigpt.norms.triton import interpreting

pytestmark = pytest.mark.thorough


@pytest.fixture
def suite() -> ModuleType:
    return importlib.import_module("gpu.suite")


def run(suite: ModuleType, out: Path, **how: Any) -> tuple[int, dict[str, Any]]:
    """Exit status and gpu.json."""
    with pytest.raises(typer.Exit) as ended:
        suite.main(out=out, **{"device": "cpu", "quick": True, "part": None} | how)
    return ended.value.exit_code, json.loads((out / "gpu.json").read_text())


def test_every_part_runs_on_the_cpu(suite: ModuleType, tmp_path: Path) -> None:
    reason = norms.available()["triton"].reason if interpreting() else "runs compiled here, and not on the CPU"
    if reason:
        pytest.skip(f"the triton norm {reason}")
    status, actual = run(suite, tmp_path)
    assert {name: how["error"] for name, how in actual["parts"].items()} == dict.fromkeys(suite.PARTS)
    rows = actual["parity"]["rows"]
    swapped = {row["norm"] for row in rows}
    assert swapped == {"fused", "textbook", "triton"}
    assert {row["case"] for row in rows} == {"single", "left-padded", "cached", "gradients"}
    assert {row["attention"] for row in rows} >= {"eager", "sdpa", "sdpa math"}
    assert all(row["bitwise"] for row in rows if row["norm"] == "fused")
    assert not all(row["bitwise"] for row in rows if row["norm"] == "textbook"), "nothing was swapped"
    assert all(row["ratio"] <= 2 for row in rows)
    assert {row["attention"] for row in actual["parity"]["unable"]} >= {"sdpa cudnn"}

    assert {row["norm"] for row in actual["norms"]["rows"]} == {"fused", "triton"}

    decoded = {row["contestant"]: row for row in actual["decode"]["rows"]}
    assert set(decoded) == {"minigpt", "transformers", "transformers, static cache", "minigpt, static step"}
    assert all(row["ids_as_minigpt"] == 1 for row in decoded.values()), "greedy decoding gave other ids"
    assert all(row["tokens_per_second"] > 0 for row in decoded.values())

    usual = [row for row in actual["tiles"]["rows"] if row["usual"]]
    assert len(usual) == 1
    assert len(actual["tiles"]["rows"]) > len(usual)

    assert status == 0


def test_an_error_beyond_what_transformers_errs_is_no_parity(suite: ModuleType) -> None:
    errors = sys.modules["gpu.parity"].errors
    truth = torch.randn(50, dtype=torch.float64)
    hf = truth + 1e-6
    assert errors("textbook", [truth - 1.9e-6], [hf], [truth])["passed"]
    assert not errors("textbook", [truth - 2.1e-6], [hf], [truth])["passed"]
    assert not errors("textbook", [truth * torch.nan], [hf], [truth])["passed"]
    assert errors("fused", [hf.clone()], [hf], [truth])["passed"]
    assert not errors("fused", [hf + 1e-12], [hf], [truth])["passed"]
    rows = [
        {"model": "gpt2", "case": "single", "dtype": "float32", "ratio": 1.0, "passed": held} for held in (True, False)
    ]
    assert suite.failures({"rows": rows}) == rows[1:]
    assert [row["logits parity"] for row in suite.verdicts({"rows": rows})] == ["FAIL", *["not judged"] * 3]


@pytest.mark.gpu
@pytest.mark.usefixtures("unchecked")  # torch.compile would trace the shape checks as well
def test_the_quick_suite_holds_on_cuda(suite: ModuleType, tmp_path: Path) -> None:
    status, actual = run(suite, tmp_path, device="cuda", part=["parity", "norms", "decode", "tiles"])
    assert {name: how["error"] for name, how in actual["parts"].items()} == dict.fromkeys(actual["parts"])
    assert status == 0
