"""minigpt parity of many pairs, against an original, and by a budget; minigpt perplexity."""

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import noisy, saved
from command_line import Run, complaint, judge
from safetensors.torch import load_file, save_file

import minigpt

PAIRS = ("--norm", "textbook", "--norm", "rms", "--sites", "*", "--sites", "ln_f,h.0.ln_2")


def test_every_pair_is_a_report_of_the_json_and_of_the_page(run: Run, talking: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    ended = judge(run, talking, *PAIRS, "--json", "-", "--html", page)
    reports = json.loads(ended.out)["reports"]
    assert [(report["norm"], report["sites"]) for report in reports] == [
        ("textbook", ["*"]), ("textbook", ["ln_f", "h.0.ln_2"]), ("rms", ["*"]), ("rms", ["ln_f", "h.0.ln_2"]),
    ]  # fmt: skip
    assert "4 reports" in page.read_text(encoding="utf-8")
    (tmp_path / "many.json").write_text(ended.out)
    (tmp_path / "one.json").write_text(json.dumps(reports[0]))
    table = tmp_path / "table.csv"
    compared = run("parity", "--compare", tmp_path / "many.json", tmp_path / "one.json", "--html", page, "--csv", table)
    lines = [*csv.DictReader(table.open())]
    assert [line["outcome"] for line in lines] == ["PASS", "PASS", "DIFFERENT", "DIFFERENT", "PASS"]
    assert [float(line["kl_mean"]) for line in lines[:4]] == [one["distribution"]["kl_mean"] for one in reports]
    assert (compared.status, compared.err) == (0, "")
    assert [line.split()[0] for line in compared.out.splitlines() if re.match("(PASS|DIFF)", line)] == [
        "PASS", "PASS", "DIFFERENT", "DIFFERENT", "PASS",
    ]  # fmt: skip
    assert "5 reports" in page.read_text(encoding="utf-8")


def test_a_different_norm_is_not_called_a_failure(run: Run, talking: Path) -> None:
    status, out, _ = judge(run, talking, "--norm", "rms")
    assert status == 1
    assert out.startswith("DIFFERENT")
    assert "KL divergence" in out.splitlines()[1]


def test_against_an_original(run: Run, talking: Path, tmp_path: Path) -> None:
    model = minigpt.from_pretrained(talking, device="cpu")
    with torch.no_grad():
        model.get_parameter("h.0.mlp.c_fc.weight").mul_(1.1)
    minigpt.save_pretrained(model, tmp_path / "tuned", minigpt.Tokenizer.from_pretrained(talking))
    ended = judge(run, tmp_path / "tuned", "--against", talking, "--text", talking / "text", "--json", "-")
    fields = json.loads(ended.out)
    assert (ended.status, fields["verdict"], fields["against"]) == (1, "fail", str(talking))
    assert fields["perplexity"]["reference"] != fields["perplexity"]["candidate"]


def test_a_record_is_judged_against_and_what_another_program_wrote(run: Run, talking: Path, tmp_path: Path) -> None:
    record, outputs = tmp_path / "record.safetensors", tmp_path / "outputs.safetensors"
    ended = judge(run, talking, "--record", record)
    assert (ended.status, "PASS" in ended.out) == (0, False)
    for norm in ("textbook", "rms"):
        again = run("parity", "--original", record, "--norm", norm, "--device", "cpu", "--json", "-")
        fresh = judge(run, talking, "--norm", norm, "--json", "-")
        assert json.loads(again.out) == json.loads(fresh.out)
        assert again.status == fresh.status
    tensors = load_file(record)
    save_file({name: x.float() for name, x in tensors.items() if name.startswith("logits")}, outputs)
    assert run("parity", "--original", record, "--outputs", outputs).status == 0
    save_file({name: x.float() * 1.01 for name, x in tensors.items() if name.startswith("logits")}, outputs)
    assert run("parity", "--original", record, "--outputs", outputs).status == 1
    assert "--original" in complaint(run("parity", "--outputs", outputs))
    assert "--norm" in complaint(run("parity", "--original", record, "--outputs", outputs, "--norm", "rms"))
    assert "--text" in complaint(run("parity", "--original", record, "--text", talking / "text"))


def test_code_that_changes_the_process(run: Run, talking: Path, tmp_path: Path) -> None:
    line = "torch.set_default_dtype(torch.float64)"
    (tmp_path / "norm.py").write_text(
        "import torch\nclass Norm(torch.nn.LayerNorm):\n    exact = False\n"
        f"    def forward(self, x):\n        {line}\n        return super().forward(x)\n"
    )
    ended = judge(run, talking, "--norm", tmp_path / "norm.py:Norm")
    assert ended.status == 1
    assert "changes the process" in " ".join(ended.out.split())


def test_a_suspect_reference_is_status_2(run: Run, talking: Path, tmp_path: Path) -> None:
    suspect = saved(noisy(vocab_size=300, n_layer=1), shutil.copytree(talking, tmp_path / "suspect"))
    assert "so it cannot be the reference" in complaint(judge(run, suspect))


def test_perplexity(run: Run, talking: Path) -> None:
    text = talking / "text"
    model, tokenizer = (
        minigpt.from_pretrained(talking, norm="rms", device="cpu"),
        minigpt.Tokenizer.from_pretrained(talking),
    )
    expected = minigpt.perplexity(model, tokenizer, text.read_text(encoding="utf-8"))
    ended = run("perplexity", talking, text, "--norm", "rms", "--device", "cpu", "--json")
    fields: dict[str, Any] = json.loads(ended.out)
    assert (ended.status, ended.err) == (0, "")
    assert fields["perplexity"] == pytest.approx(expected, rel=1e-6)
    assert (fields["norm"], fields["sites"], fields["text"]) == ("rms", ["*"], str(text))
    protocol = {name: fields[name] for name in ("stride", "bos", "window")}
    assert protocol == {"stride": 64, "bos": False, "window": 128}
    ended = run("perplexity", talking, text, "--stride", 127, "--bos", "--device", "cpu")
    assert re.search(r"\n[\d,]+ of [\d,]+ tokens scored in \d+ windows of 128, stride 127, each after", ended.out)
    assert "--stride must be from 1 to 128" in run("perplexity", talking, text, "--stride", 129).err
    shown = run("perplexity", talking, text, "--norm", "rms", "--device", "cpu").out
    assert shown.startswith(f"{expected:.6g}"[:5])
    twice = json.loads(run("perplexity", talking, text, text, "--norm", "rms", "--device", "cpu", "--json").out)
    assert [row["text"] for row in twice["texts"]] == [str(text)] * 2
    assert twice["perplexity_by_text"] == pytest.approx(expected, rel=1e-6)
    plain = minigpt.perplexity(minigpt.from_pretrained(talking, device="cpu"), tokenizer, text.read_text("utf-8"))
    own = [*twice["texts"], twice, fields]
    assert [of["perplexity_of_the_original"] for of in own] == pytest.approx([plain] * 4, rel=1e-6)
    assert f"\n{plain:.6g}"[:5] in shown
    assert f"that of the original, {talking}\n" in shown
    alone = json.loads(run("perplexity", talking, text, "--device", "cpu", "--json").out)
    assert "original" not in alone
    against = json.loads(run("perplexity", talking, text, "--against", talking, "--device", "cpu", "--json").out)
    assert against["perplexity_of_the_original"] == against["perplexity"] == alone["perplexity"]


def test_a_foreign_norm_of_the_checkpoint_is_named_again(tmp_path: Path) -> None:
    model = minigpt.from_pretrained("demo", norm="torch.nn:RMSNorm", device="cpu")
    minigpt.save_pretrained(model, tmp_path, minigpt.Tokenizer.from_pretrained("demo"))
    with pytest.raises(minigpt.NormError, match="not a registered one"):
        minigpt.parity(tmp_path, device="cpu")
    how = {"norm": torch.nn.RMSNorm, "device": "cpu", "prompts": ["Once upon"], "max_new_tokens": 4}
    again, fresh = minigpt.parity(tmp_path, **how), minigpt.parity("demo", **how)
    assert again.distribution.kl_mean == pytest.approx(fresh.distribution.kl_mean, rel=1e-3)
