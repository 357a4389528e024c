"""Parity with transformers at the published sizes, with massive activations: on a GPU; on the CPU, at a tiny size."""

import fcntl
import importlib
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.thorough

SIZES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("size", "where"), [("gpt2", "cpu"), *(pytest.param(size, "cuda", marks=pytest.mark.gpu) for size in SIZES)]
)
def test_logits_and_gradients(size: str, where: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every attention and backend that runs, every norm, alone, padded, through a cache, and backward."""
    parity: Any = importlib.import_module("gpu.parity")
    if where == "cpu":  # interpreted kernels have tests of their own
        monkeypatch.setattr(parity, "NORMS", ("fused", "textbook"))
    with (Path(tempfile.gettempdir()) / "minigpt-gpu-parity.lock").open("w") as lock:
        fcntl.flock(
            lock, fcntl.LOCK_EX
        )  # of several processes, one at a time: the largest model takes 45 GB in float64
        try:
            rows = list(parity.judged(size, dtype, torch.device(where), quick=where == "cpu"))
        finally:
            if where == "cuda":
                torch.cuda.empty_cache()  # what this process keeps for later, the next one cannot have
    ran = [row for row in rows if "why" not in row]
    for row in ran:
        print("{attention}, {norm}, {case}: apart {max_apart:.3g}, scale {scale:.3g}, ratio {ratio:.3g}".format(**row))
    assert {row["attention"] for row in ran} >= {"eager", "sdpa", "sdpa math"}
    assert len({(row["norm"], row["case"]) for row in ran}) == len({row["norm"] for row in ran}) * 4 >= 8
    assert not [row for row in ran if not row["passed"]]
