"""Training with swaps, killed and resumed."""

import os
import signal
import subprocess
import sys
import time

import pytest
from safetensors.torch import load_file

TEXT = "The old sailor told Mara a tale of the sea. One morning the bell rang and nobody came. " * 60
OPTIONS = ["--norm", "frozen", "--schedule", "h.*.ln_2@2+1, h.*.ln_1@6+1, ln_f@10, first@11", "--steps", "14",
           "--batch-size", "2", "--block-size", "32", "--save-steps", "1", "--device", "cpu"]  # fmt: skip


def command(folder, out):
    return [
        sys.executable,
        "-m",
        "minigpt",
        "finetune",
        "--text",
        str(folder / "text.txt"),
        "--out",
        str(out),
        *OPTIONS,
    ]


@pytest.mark.thorough
def test_a_killed_run_ends_with_the_same_weights(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    subprocess.run(command(tmp_path, tmp_path / "whole"), check=True, timeout=300)
    cut = tmp_path / "cut"
    for step in (4, 8):
        run = subprocess.Popen(command(tmp_path, cut))
        deadline = time.monotonic() + 120
        while not (cut / f"checkpoints/checkpoint-{step}").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
        assert not (cut / "model.safetensors").exists()
    subprocess.run(command(tmp_path, cut), check=True, timeout=300)
    whole, resumed = (load_file(folder / "model.safetensors") for folder in (tmp_path / "whole", cut))
    assert whole.keys() == resumed.keys()
    assert all(whole[name].equal(resumed[name]) for name in whole)
