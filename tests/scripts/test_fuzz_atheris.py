"""Fuzzing by coverage: it reads every kind of file, and reaches more than its seeds do."""

import json

import pytest
from test_scripts import run


def test_a_few_runs() -> None:
    pytest.importorskip("atheris", reason="fuzzing by coverage needs atheris: pip install 'minigpt[fuzz]'")
    status, out, _ = run("fuzz/by_coverage.py", "--runs", 60)
    found = json.loads(out)
    assert (status, found["executions"], found["escaped"]) == (0, 60, [])
    assert sum(found["outcomes"].values()) == 60
    files = {name.rpartition(":")[0].rpartition("/")[2] for name in found["outcomes"]}
    print(sorted(files), found["reached"])
    assert {"config.json", "model.safetensors", "tokenizer.json", "gpt2.npz", "pytorch_model.bin"} <= files
    assert found["reached"]["in the end"]["edges"] > found["reached"]["by the seeds"]["edges"]
