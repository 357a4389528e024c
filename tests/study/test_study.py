"""Studies: what is checked before the first cell, and what a second start does."""

import json

import pytest

import minigpt
from minigpt.study import Cell, Study, read_study
from minigpt.study.study import append, command, finished, slug
from minigpt.study.table import csv_table, page

ROW = {
    "model": "demo", "norm": "rms", "sites": "*", "seed": 0, "verdict": "fail", "ratio": 2.5, "kl_mean": 0.1,
    "top1_agreement": 0.9, "perplexity_before": 2.0, "perplexity_after": 3.0, "perplexity_recovered": None,
    "seconds": 1.0, "command": "minigpt parity", "report": "reports/a.json", "losses": [],
    "eval_losses": [[0, 2.0], [10, 1.0]], "swaps": {"ln_f": 5}, "kl_recovered": None, "top1_recovered": None,
    "decode_norm_share": 0.1, "tasks": {},
}  # fmt: skip


def test_a_torn_line_is_cut_off(tmp_path):
    append(tmp_path, ROW)
    with (tmp_path / "cells.jsonl").open("a") as stream:
        stream.write(json.dumps(ROW | {"seed": 1})[:40])
    assert list(finished(tmp_path)) == [("demo", "rms", "*", 0)]
    append(tmp_path, ROW | {"seed": 2})
    assert list(finished(tmp_path)) == [("demo", "rms", "*", 0), ("demo", "rms", "*", 2)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('norms = ["no_such"]', "unknown norm 'no_such'"),
        ('norms = ["rms"]\nsites = ["h.9.*"]', "no norm site matches 'h.9.\\*'"),
        ('norms = ["rms"]\ntext = "missing.txt"', "there is no file missing.txt"),
        ('norms = ["rms"]\ncolour = 1', "unknown field 'colour'"),
        ('norms = ["rms"]\n[finetune]\ntext = "missing.txt"\nsteps = 2', "missing.txt is not a file"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path, lines, message):
    file = tmp_path / "study.toml"
    file.write_text(f'models = ["demo"]\n{lines}\n')
    with pytest.raises(minigpt.MiniGPTError, match=message):
        read_study(file)


def test_the_page_and_csv_hold_every_row(tmp_path):
    text = page([ROW, ROW | {"norm": "<b>"}], "a study", tmp_path, tmp_path / "study.html")
    assert text.count("<polyline") == 2
    assert "&lt;b&gt;" in text
    assert csv_table([ROW]).splitlines()[1].startswith("demo,rms,*,0,fail,2.5")


def test_commands_and_files_of_cells():
    cell = Cell("demo", "my_norm.py:MyNorm", "h.*.ln_1", 0)
    assert command(Study(["demo"], [cell.norm]), cell, None).startswith("minigpt parity --model demo --norm my_norm.py")
    assert "/" not in slug(cell)
    assert slug(cell) != slug(Cell("demo", "my_norm.py:MyNorm", "h.?.ln_1", 0))
