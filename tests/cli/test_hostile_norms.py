"""A norm's code that ends the process never gives status 0, and an empty name is no model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
ENDS = {"os._exit(0)": "os", "posix._exit(1)": "posix", 'os.execvp("true", ["true"])': "os"}


def shell(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "minigpt", *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300
    )


@pytest.mark.parametrize("end", ENDS, ids=["exit", "posix", "exec"])
@pytest.mark.parametrize("words", ["generate x", "perplexity demo TEXT", "sites demo --text TEXT", "convert demo OUT"])
def test_a_norm_that_ends_the_process_gives_no_result(words: str, end: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("Once upon a time there was a young gardener named Tom. " * 20)
    (tmp_path / "ends.py").write_text(
        f"import {ENDS[end]}\nimport minigpt\n\n\nclass Ends(minigpt.LayerNorm):\n    def standardize(self, x):\n"
        f"        {end}\n"
    )
    filled = words.replace("TEXT", str(tmp_path / "text")).replace("OUT", str(tmp_path / "out")).split()
    done = shell(*filled, "--norm", f"{tmp_path / 'ends.py'}:Ends")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert not (tmp_path / "out").exists()


def test_an_empty_name_is_no_model(tmp_path: Path) -> None:
    for words in (["info", ""], ["convert", "", tmp_path / "out"], ["generate", "x", "--model", ""]):
        done = shell(*words)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: --model")


def test_a_perplexity_that_is_no_number_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("Once upon a time there was a young gardener named Tom.")
    (tmp_path / "nan.py").write_text(
        "import minigpt\n\n\nclass Nan(minigpt.LayerNorm):\n"
        "    def standardize(self, x):\n        return x * float('nan')\n"
    )
    done = shell("perplexity", "demo", tmp_path / "text", "--norm", f"{tmp_path / 'nan.py'}:Nan", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert "nan" in done.stderr
