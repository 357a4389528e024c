"""Studies: what is checked before the first cell, and which kept cells count."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import minigpt
from minigpt.study import Study, read_study
from minigpt.study.study import append, command, fingerprint_of, finished, only
from minigpt.study.table import csv_table, page

ROW = {
    "model": "demo", "norm": "rms", "sites": "*", "seed": 0, "verdict": "fail", "outcome": "DIFFERENT", "ratio": 2.5,
    "kl_mean": 0.1, "kl_median": 0.05, "top1_agreement": 0.9, "perplexity_before": 2.0, "perplexity_after": 3.0,
    "perplexity_recovered": None, "seconds": 1.0, "command": "minigpt parity", "report": "reports/a.json", "losses": [],
    "eval_losses": [[0, 2.0], [10, 1.0]], "swaps": {"ln_f": 5}, "kl_recovered": None, "kl_median_recovered": None,
    "top1_recovered": None, "decode_norm_share": 0.1, "tasks": {}, "fingerprint": "f0",
}  # fmt: skip
NORM = """
from minigpt import LayerNorm

class Scaled(LayerNorm):
    def standardize(self, x):
        return super().standardize(x) * 1.01
"""
TUNED = '\n[finetune]\ntext = "train.txt"\nsteps = 10\nbatch_size = 2\nblock_size = 16\n'


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a study of a norm in a file, a text and a trained cell; it is the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "study_metrics", raising=False)
    (tmp_path / "my_norm.py").write_text(NORM)
    (tmp_path / "study_metrics.py").write_text("def loss(model, tokenizer): return 42.0")
    for name in ("text.txt", "train.txt"):
        (tmp_path / name).write_text("The old sailor told Mara a tale of the sea. " * 20)
    (tmp_path / "study.toml").write_text(
        f'models = ["demo"]\nnorms = ["my_norm.py:Scaled"]\nsites = ["ln_f"]\ntext = "text.txt"\n'
        f'device = "cpu"\nmetrics = ["study_metrics:loss"]\n{TUNED}'
    )
    return tmp_path


def fingerprints(study: Path) -> dict[str, str]:
    asked = read_study(study)
    return {cell["norm"]: fingerprint_of(asked, cell) for cell in asked.cells()}


CHANGES: dict[str, tuple[str, Any]] = {
    "steps": ("study.toml", lambda text: text.replace("steps = 10", "steps = 4")),
    "another text": ("study.toml", lambda text: text.replace('"text.txt"', '"train.txt"')),
    "an edited text": ("text.txt", lambda text: text + "One morning the bell rang."),
    "an edited text to train on": ("train.txt", lambda text: text + "One morning the bell rang."),
    "an edited norm": ("my_norm.py", lambda text: text.replace("1.01", "1.02")),
    "an edited metric in a module": ("study_metrics.py", lambda text: text.replace("42", "43")),
    "no training": ("study.toml", lambda text: text.replace(TUNED, "")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_what_decides_a_cell_is_another_cell(place: Path, change: str) -> None:
    before = fingerprints(place / "study.toml")
    assert fingerprints(place / "study.toml") == before
    file, edit = CHANGES[change]
    (place / file).write_text(edit((place / file).read_text()))
    after = fingerprints(place / "study.toml")
    assert after["my_norm.py:Scaled"] != before["my_norm.py:Scaled"]
    if change == "an edited norm":
        assert after["fused"] == before["fused"]


def test_other_weights_at_the_same_path_are_another_cell(tmp_path: Path) -> None:
    study = Study([str(tmp_path / "model")], ["rms"])
    (cell,) = study.cells()
    model = minigpt.from_pretrained("demo", device="cpu")
    minigpt.save_pretrained(model, tmp_path / "model")
    before = fingerprint_of(study, cell)
    minigpt.save_pretrained(model, tmp_path / "model")
    assert fingerprint_of(study, cell) == before
    model.ln_f.weight.data[0] += 1
    minigpt.save_pretrained(model, tmp_path / "model")
    assert fingerprint_of(study, cell) != before


def run(place: Path, *words: str, without: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command in ``place``; ``without`` is a package that cannot be imported."""
    code = f"import sys; sys.modules[{without!r}] = None; from minigpt.cli import main; main()"
    start = [sys.executable, "-m", "minigpt"] if without is None else [sys.executable, "-c", code]
    return subprocess.run(
        [*start, *words], cwd=place, capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"COLUMNS": "200"},
    )  # fmt: skip


@pytest.mark.thorough
def test_a_study_runs_again_what_has_changed_and_shows_its_own_cells_only(place: Path) -> None:
    def rows() -> list[dict[str, Any]]:
        done = run(place, "study", "study.toml", "--out", "out", "--csv", "table.csv")
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in (place / "out/cells.jsonl").read_text().splitlines()]
        assert len((place / "table.csv").read_text().splitlines()) == 1 + 2 - ("[finetune]" not in study.read_text())
        return lines

    study = place / "study.toml"
    assert [row["losses"][-1][0] for row in rows()] == [10, 10]
    assert len(rows()) == 2  # nothing ran again
    file, edit = CHANGES["steps"]
    (place / file).write_text(edit(study.read_text()))
    assert [row["losses"][-1][0] for row in rows()[2:]] == [4, 4]
    (place / "my_norm.py").write_text(NORM.replace("1.01", "3.0"))
    *_, before, _, after = rows()
    assert len(rows()) == 5
    assert after["kl_mean"] > before["kl_mean"]
    study.write_text(study.read_text().replace(TUNED.replace("10", "4"), ""))
    assert [row["perplexity_recovered"] for row in rows()[5:]] == [None]


def test_finetune_goes_on_with_the_same_run_only(place: Path) -> None:
    """A finished run that is started again keeps its weights; a run on another text does not replace them."""
    words = ("finetune", "--text", "train.txt", "--out", "tuned", "--batch-size", "1", "--block-size", "8",
             "--device", "cpu", "--save-steps", "1", "--steps", "2")  # fmt: skip
    written = []
    for _ in range(2):
        assert run(place, *words).returncode == 0
        written.append((place / "tuned/model.safetensors").read_bytes())
    (place / "train.txt").write_text("Another text. " * 20)
    refused = run(place, *words)
    assert refused.returncode == 2
    assert "tuned holds a model of another run" in refused.stderr
    written.append((place / "tuned/model.safetensors").read_bytes())
    assert written[0] == written[1] == written[2]


@pytest.mark.parametrize(
    ("words", "without", "extra"),
    [
        (("finetune", "--text", "train.txt", "--steps", "2", "--out", "new"), "accelerate", "minigpt[hf]"),
        (("finetune", "--text", "train.txt", "--steps", "2", "--out", "new", "--lora", "2"), "peft", "minigpt[hf]"),
        (("study", "study.toml", "--out", "new"), "accelerate", "minigpt[hf]"),
        (("study", "tasks.toml", "--out", "new"), "lm_eval", "lm-eval[hf]"),
    ],
)
def test_a_missing_extra_is_one_sentence_before_any_work(
    place: Path, words: tuple[str, ...], without: str, extra: str
) -> None:
    (place / "tasks.toml").write_text('models = ["demo"]\nnorms = ["rms"]\ntasks = ["hellaswag"]\n')
    done = run(place, *words, without=without)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert f"pip install '{extra}'" in done.stderr
    assert not (place / "new").exists()


def test_a_torn_line_is_cut_off(tmp_path: Path) -> None:
    append(tmp_path, ROW)
    with (tmp_path / "cells.jsonl").open("a") as stream:
        stream.write(json.dumps(ROW | {"fingerprint": "f1"})[:40])
    assert list(finished(tmp_path)) == ["f0"]
    append(tmp_path, ROW | {"fingerprint": "f2"})
    assert list(finished(tmp_path)) == ["f0", "f2"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('norms = ["no_such"]', "unknown norm 'no_such'"),
        ('norms = ["rms"]\nsites = ["h.9.*"]', "no norm site matches 'h.9.\\*'"),
        ('norms = ["rms"]\ntext = "missing.txt"', "there is no file missing.txt"),
        ('norms = ["rms"]\ncolour = 1', "unknown field 'colour'"),
        ('norms = ["rms"]\n[finetune]\ntext = "missing.txt"\nsteps = 2', "missing.txt is not a file"),
        ('norms = ["rms"]\n[finetune]\ntext = "missing.txt"\nsteps = "2"', "steps must be of type int"),
        ('norms = ["rms"]\nseeds = ["a"]', r"seeds must be of type list\[int\]"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path: Path, lines: str, message: str) -> None:
    file = tmp_path / "study.toml"
    file.write_text(f'models = ["demo"]\n{lines}\n')
    with pytest.raises(minigpt.MiniGPTError, match=message):
        read_study(file)


def test_lists_in_finetune_are_cells_and_the_baseline_is_trained_once_for_each() -> None:
    tuning = {"text": "t", "steps": 3, "distill": [False, True], "schedule": ["*@0", "ln_f@1"]}
    cells = Study(["demo"], ["rms"], seeds=[0, 1], finetune=tuning).cells()
    assert [cell["norm"] for cell in cells] == ["fused"] * 2 * 2 + ["rms"] * 2 * 2 * 2


def test_the_page_and_csv_hold_every_row(tmp_path: Path) -> None:
    text = page([ROW, ROW | {"norm": "<b>"}], "a study", tmp_path, tmp_path / "study.html")
    assert text.count("<polyline") == 2
    assert "&lt;b&gt;" in text
    assert "DIFFERENT" in text
    assert csv_table([ROW]).splitlines()[1].startswith("demo,rms,*,0,,fail,DIFFERENT,2.5")


def test_the_command_of_a_cell_runs_that_cell() -> None:
    study = Study(["demo"], ["my_norm.py:MyNorm"])
    assert command(study, study.cells()[0], None).startswith("minigpt parity --model demo --norm my_norm.py")
    study = Study(["demo"], ["rms"], ["*", "ln_f"], [3, 4], finetune={"text": "t", "steps": 3, "lora": [2, 4]})
    wanted = study.cells()[-1]
    words = command(study, wanted, Path("s.toml")).split()
    assert only(study, [word for before, word in itertools.pairwise(words) if before == "--only"]) == [wanted]
    with pytest.raises(minigpt.ConfigError, match="no cell has norm=dyt"):
        only(study, ["norm=dyt"])
