"""A study that is killed again and again, or run on Ray, ends with the table of an undisturbed one."""

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.thorough

STUDY = """
models = ["demo"]
norms = ["fused", "rms", "std_eps", "dyt"]
sites = ["*", "ln_f", "h.0.*"]
text = "text.txt"
device = "cpu"
"""
CELLS = 10  # fused at other sites is the same cell
TEXT = "The old sailor told Mara a tale of the sea. One morning the bell rang, and no one came. " * 20


ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}  # as many as a worker of Ray has: the sums are the same bytes


def command(*more: str) -> list[str]:
    return [sys.executable, "-m", "minigpt", "study", "study.toml", *more]


def table(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "cells.jsonl").read_text().splitlines()]
    rows = [{name: value for name, value in row.items() if name not in ("seconds", "protocol")} for row in rows]
    return sorted(rows, key=lambda row: (row["norm"], row["sites"]))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the study, run once undisturbed."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "study.toml").write_text(STUDY)
    (folder / "text.txt").write_text(TEXT)
    subprocess.run(command("--out", "whole"), cwd=folder, env=ONE_THREAD, check=True, timeout=600, capture_output=True)
    assert len(table(folder / "whole")) == CELLS
    return folder


def finished(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_a_study_that_is_killed_three_times_ends_with_the_same_table(place: Path) -> None:
    chance, cells = random.Random(0), place / "cut" / "cells.jsonl"
    for most in (2, 5, 7):  # of 10: the last cells are not reached before the kill
        run = subprocess.Popen(
            command("--out", "cut"), cwd=place, env=ONE_THREAD, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 300
        while finished(cells) < most and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(chance.uniform(0, 1.5))  # somewhere within the next cell
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
        assert finished(cells) < CELLS
    subprocess.run(command("--out", "cut"), cwd=place, env=ONE_THREAD, check=True, timeout=600, capture_output=True)
    assert table(place / "cut") == table(place / "whole")


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed; pip install -e '.[ray]'")
def test_a_study_on_ray_ends_with_the_same_table(place: Path) -> None:
    subprocess.run(
        command("--out", "ray", "--ray"), cwd=place, env=ONE_THREAD, check=True, timeout=900, capture_output=True
    )
    assert table(place / "ray") == table(place / "whole")
