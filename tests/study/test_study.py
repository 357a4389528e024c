"""Studies: what is checked before the first cell, which kept cells count, and what becomes of a cell that fails."""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import talking
from norm_classes import SCALED

import minigpt
from minigpt import NormError
from minigpt.files import Lines
from minigpt.study.export import save_frozen
from minigpt.study.file import read_study
from minigpt.study.run import run_study
from minigpt.study.settings import takes_text
from minigpt.study.study import Study, cells_with, command, fingerprint_of

BROKEN = """
class Broken(LayerNorm):
    def standardize(self, x):
        raise OSError("the disk is full")
"""
NORM = SCALED + BROKEN
TUNED = '\n[finetune]\ntext = "train.txt"\nsteps = 10\nbatch_size = 2\nblock_size = 16\n'


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a study of a norm in a file, a text and a trained cell; it is the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "study_metrics", raising=False)
    (tmp_path / "my_norm.py").write_text(NORM)
    (tmp_path / "study_metrics.py").write_text(
        "def loss(model, tokenizer): return 42.0\ndef bad(model, tokenizer): return float('inf')"
    )
    for name in ("text.txt", "train.txt", "cal.txt"):
        (tmp_path / name).write_text("The old sailor told Mara a tale of the sea. " * 20)
    (tmp_path / "study.toml").write_text(
        f'models = ["demo"]\nnorms = ["my_norm.py:Scaled"]\nsites = ["ln_f"]\ntext = "text.txt"\nfit = "cal.txt"\n'
        f'device = "cpu"\nmetrics = ["study_metrics:loss"]\n{TUNED}'
    )
    return tmp_path


def fingerprints(study: Path) -> dict[str, str]:
    plan = read_study(study)
    return {cell.settings()["norm"]: fingerprint_of(plan, cell) for cell in plan.cells()}


CHANGES: dict[str, tuple[str, Any]] = {
    "steps": ("study.toml", lambda text: text.replace("steps = 10", "steps = 4")),
    "keep": ("study.toml", lambda text: 'keep = "shift"\n' + text),
    "another text": ("study.toml", lambda text: text.replace('"text.txt"', '"train.txt"')),
    "an edited text": ("text.txt", lambda text: text + "One morning the bell rang."),
    "an edited text to train on": ("train.txt", lambda text: text + "One morning the bell rang."),
    "an edited text to fit on": ("cal.txt", lambda text: text + "One morning the bell rang."),
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
    if change in ("an edited norm", "keep", "an edited text to fit on"):
        assert after["fused"] == before["fused"]  # the control has none of it


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
    assert after["fingerprint"] != before["fingerprint"]
    study.write_text(study.read_text().replace(TUNED.replace("10", "4"), ""))
    assert [row["perplexity_recovered"] for row in rows()[5:]] == [None]


@pytest.mark.thorough
def test_a_cell_that_fails_is_a_row_and_the_others_run(place: Path) -> None:
    """By a norm that raises, a metric without a figure, and a model whose own norms are not LayerNorm."""
    model, tokenizer = minigpt.Recipe(norm="dyt", fit="text.txt", device="cpu").open()
    minigpt.save_pretrained(model, "own", tokenizer)
    (place / "study.toml").write_text(
        'models = ["demo", "own"]\nnorms = ["my_norm.py:Scaled", "rms"]\ndevice = "cpu"\ntext = "text.txt"\n'
        'metrics = ["study_metrics:bad", "study_metrics:loss"]\n' + TUNED + "learning_rate = [1e30, 1e-4]"
    )
    (place / "my_norm.py").write_text(NORM)
    plan = read_study(place / "study.toml")
    (place / "my_norm.py").write_text(NORM.replace("Scaled", "Other").replace("Broken", "Scaled"))
    rows = run_study(plan, place / "out")
    assert [row["outcome"] in ("FAILED", "DIVERGED") for row in rows] == [True, False, True, True, True, False] * 2
    assert all(row["reason"] for row in rows)  # of the others, the metric's
    whole = [row for row in rows if row["perplexity_recovered"]]
    assert all(row["metrics"] == {"study_metrics:bad": None, "study_metrics:loss": 42.0} for row in whole)
    assert {(row["model"], row["norm"]) for row in whole} == {
        ("demo", "fused"), ("demo", "rms"), ("own", "own"), ("own", "rms"),
    }  # fmt: skip
    (place / "my_norm.py").write_text(NORM)
    again = run_study(plan, place / "out")
    assert [row["outcome"] for row in again].count("FAILED") == 0


def test_a_study_in_a_folder_that_another_writes_or_with_a_damaged_line_is_one_sentence(place: Path) -> None:
    study = Study(["demo"], ["rms"])
    (place / "out").mkdir()
    with Lines(place / "out/cells.jsonl"), pytest.raises(minigpt.ConfigError, match=r"cells\.jsonl"):
        run_study(study, place / "out")
    (place / "out/cells.jsonl").write_text('{"fingerprint": "a"}\n{"finger\n{"fingerprint": "b"}\n')
    with pytest.raises(minigpt.ConfigError, match="line 2"):
        run_study(study, place / "out")


@pytest.mark.thorough
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
    assert "tuned" in refused.stderr
    written.append((place / "tuned/model.safetensors").read_bytes())
    assert written[0] == written[1] == written[2]


@pytest.mark.parametrize(
    ("words", "without", "extra"),
    [
        pytest.param(
            ("finetune", "--text", "train.txt", "--steps", "2", "--out", "new", "--lora", "2"),
            "peft",
            ".[hf]",
            marks=pytest.mark.thorough,
        ),
        (("study", "study.toml", "--out", "new"), "accelerate", ".[hf]"),
    ],
)
def test_a_missing_extra_is_one_sentence_before_any_work(
    place: Path, words: tuple[str, ...], without: str, extra: str
) -> None:
    done = run(place, *words, without=without)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") or "\nerror: " in done.stderr
    assert f"pip install -e '{extra}'" in done.stderr
    assert not (place / "new").exists()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('norms = ["no_such"]', "no_such"),
        ('norms = ["rms"]\nsites = ["h.9.*"]', "h.9"),
        ('norms = ["rms"]\ntext = "missing.txt"', "missing.txt"),
        ('norms = ["rms"]\ncolour = 1', "colour"),
        ('norms = ["rms"]\nkeep = "foo"', "foo"),
        ('norms = ["rms"]\n[finetune]\ntext = "missing.txt"\nsteps = 2', "missing.txt"),
        ('norms = ["rms"]\n[finetune]\ntext = "missing.txt"\nsteps = "2"', "steps"),
        ('norms = ["rms"]\nseeds = ["a"]', "seeds"),
        ('norms = ["rms"]\nattention = "flash"', "study.toml: attention must be sdpa or eager"),
        ('norms = ["rms"]\n[finetune]\ntext = "study.toml"\nsteps = 0', "study.toml: steps must be 1 or more"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path: Path, lines: str, message: str) -> None:
    file = tmp_path / "study.toml"
    file.write_text(f'models = ["demo"]\n{lines}\n')
    with pytest.raises(minigpt.MiniGPTError, match=message) as caught:
        read_study(file)
    assert caught.value.argument is None, "an option of the shell would be named"


def test_lists_are_cells_and_the_controls_are_trained_once_for_each_way_of_training() -> None:
    tuning = {"text": "t", "steps": 3, "distill": [False, True], "schedule": ["*@0", "ln_f@1"], "residual_loss": 0.1}
    cells = Study(["demo"], ["rms"], sites=["*", "ln_f"], seeds=[0, 1], finetune=tuning).cells()
    assert [cell.recipe.norm for cell in cells] == [None] * 2 * 2 * 2 + ["rms"] * 2 * 2 * 2 * 2
    assert {cell.training.residual_loss for cell in cells if cell.recipe.norm is None and cell.training} == {0, 0.1}


def test_a_site_that_one_of_two_models_lacks_is_refused_in_its_cell_alone(place: Path) -> None:
    small = talking(place / "small")
    lists = 'norms = ["rms"]\nsites = ["h.1.ln_1", "ln_f"]\ndevice = "cpu"\n'
    (place / "study.toml").write_text(f'models = ["{small}", "demo"]\n{lists}')
    plan = read_study(place / "study.toml")
    lacking = next(cell for cell in plan.cells() if cell.recipe.source == str(small))
    (row,) = run_study(plan, place / "out", cells=[lacking])
    assert row["outcome"] == "FAILED"
    assert "no norm site matches 'h.1.ln_1'" in row["reason"]
    (place / "study.toml").write_text(f'models = ["{small}"]\n{lists}')
    with pytest.raises(NormError, match=r"no norm site matches 'h\.1\.ln_1'"):
        read_study(place / "study.toml")


def test_a_schedule_that_one_of_two_models_lacks_is_refused_in_its_cell_alone(place: Path) -> None:
    small = talking(place / "small")
    tuned = TUNED + 'schedule = "h.1.ln_1@2"\n'
    (place / "study.toml").write_text(f'models = ["{small}", "demo"]\nnorms = ["rms"]\n{tuned}')
    assert len(read_study(place / "study.toml").cells()) == 4
    (place / "study.toml").write_text(f'models = ["{small}"]\nnorms = ["rms"]\n{tuned}')
    with pytest.raises(NormError, match=r"no norm site matches 'h\.1\.ln_1'"):
        read_study(place / "study.toml")


def test_every_option_of_a_recipe_reaches_the_cell(place: Path) -> None:
    (place / "study.toml").write_text(
        'models = ["demo"]\nnorms = ["rms"]\nsites = "h.0.*,ln_f"\nkeep = "none"\ncenter = true\nattention = "eager"\n'
        'dtype = ["bfloat16", false]\nfit = [false, "cal.txt"]\ndevice = "cpu"\n'
    )
    same = {"sites": ["h.0.*", "ln_f"], "keep": (), "center": True, "attention": "eager", "device": "cpu"}
    assert [cell.recipe for cell in read_study(place / "study.toml").cells()] == [
        minigpt.Recipe("demo", norm="rms", fit=fit, dtype=dtype, **same)
        for fit in (None, "cal.txt") for dtype in ("bfloat16", None)
    ]  # fmt: skip


@pytest.mark.parametrize("options", [
    {"finetune": {"text": "t", "steps": 3, "lora": [None, 4]}, "seeds": [3, 4], "sites": ["*", "ln_f"]},
    {"options": {"arithmetic": ["fast", "reference"]}},  # which the shell has no word for
])  # fmt: skip
def test_the_command_of_a_cell_runs_that_cell(options: dict[str, Any]) -> None:
    study = Study(["demo"], ["rms"], **options)
    last = study.cells()[-1]
    words = shlex.split(command(study, last, Path("s.toml")))
    assert words[:3] == ["minigpt", "study", "s.toml"]
    chosen = [word for before, word in itertools.pairwise(words) if before == "--only"]
    assert cells_with(study, chosen) == [last]
    assert not any(word.startswith("steps=") for word in chosen), "only what varies is named"
    with pytest.raises(minigpt.ConfigError) as error:
        cells_with(study, ["norm=dyt"])
    assert error.value.argument == "only"


def test_the_command_of_a_cell_that_is_not_trained_is_parity() -> None:
    study = Study(["demo"], ["my_norm.py:MyNorm"], text="held.txt")
    assert command(study, study.cells()[0], None) == "minigpt parity --norm my_norm.py:MyNorm --text held.txt"


@pytest.mark.parametrize(("own", "name"), [("fused", "fused"), ("dyt", "own"), ("frozen", "own")])
def test_a_cell_names_its_model_s_own_norms_without_its_weights(place: Path, own: str, name: str) -> None:
    """By config.json, where a huge eps says that norms are frozen."""
    model = minigpt.from_pretrained("demo", device="cpu", norm=own, fit=None if own == "fused" else "text.txt")
    for norm in model.norm_modules().values():
        if own == "frozen":
            norm.freeze(norm.calibration[0], norm.calibration[0])
    (save_frozen if own == "frozen" else minigpt.save_pretrained)(model, "saved")
    (place / "saved" / "model.safetensors").write_bytes(b"")
    (cell,) = Study(["saved"], ["own"]).cells()
    assert cell.settings()["norm"] == name
    (place / "saved" / "config.json").unlink()
    assert cell.settings()["norm"] == name


@pytest.mark.parametrize("where", ["norm", "metric"])
def test_ctrl_c_in_somebody_s_code_ends_the_study(place: Path, where: str) -> None:
    """And is no failed cell."""
    raises = "raise KeyboardInterrupt"
    (place / "stop.py").write_text(
        "from minigpt import LayerNorm\nclass Norm(LayerNorm):\n  def standardize(self, x):\n"
        f"    {raises if where == 'norm' else 'return super().standardize(x)'}\n"
        f"def metric(model, tokenizer): {raises}\n"
    )
    plan = Study(["demo"], ["stop.py:Norm", "rms"], device="cpu", metrics=["stop.py:metric"])
    with pytest.raises(KeyboardInterrupt):
        run_study(plan, place / "out")
    cells = place / "out" / "cells.jsonl"
    assert not cells.exists() or cells.read_text() == ""


@pytest.mark.parametrize("file", sorted((Path(__file__).parents[2] / "configs" / "studies").glob("*.toml")))
def test_every_study_of_the_repository_can_be_read(file: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the demo as each of its models, whatever they are."""
    for name in ("held.txt", "pile-filtered.txt", "owt.txt"):
        (place / name).write_text("The old sailor told Mara a tale of the sea. " * 20)
    text = re.sub(r'"[\w-]+/gpt2[\w-]*"|"openai-community/gpt2[\w-]*"|"centred"', '"demo"', file.read_text())
    text = re.sub(r'schedule = "[^"]*"', 'schedule = "*@0"', text) if "gpt2" in file.name else text
    (place / file.name).write_text(text)
    assert read_study(place / file.name).cells()


@pytest.mark.thorough
def test_an_original_is_read_and_named_once(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(
        'models = ["demo"]\nnorms = ["textbook", "rms"]\ndevice = "cpu"\nprompts = ["Tom"]\n'
    )
    said: list[str] = []
    run_study(read_study(tmp_path / "study.toml"), tmp_path / "out", lambda what, _: said.append(what))
    assert [what.rpartition(": ")[2] for what in said].count("reading the original") == 1
    assert [what.rpartition(": ")[2] for what in said].count("judging it at the swap") == 2


@pytest.mark.parametrize(
    ("norm", "takes"), [("frozen", True), ("taper:0.5", True), ("taper", True), ("taper:1", False), ("rms", False)]
)
def test_a_norm_that_needs_a_text_takes_the_studys(norm: str, takes: bool, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("Once upon a time there was a garden. " * 40)
    text = str(tmp_path / "text")
    (cell,) = Study(models=["demo"], norms=[norm], text=text).cells()
    assert cell.recipe.fit == (text if takes else None)
    assert takes_text(norm) == takes
    (own,) = Study(models=["demo"], norms=[norm], text=text, options={"fit": ["other"]}).cells()
    assert own.recipe.fit == "other"
