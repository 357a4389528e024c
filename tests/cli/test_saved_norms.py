"""Commands on a checkpoint that names other norms: they stay, and a foreign class must be named again."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import minigpt
from minigpt.cli import app


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("Once upon a time there was a miller. He had a sister, and she was kind.", encoding="utf-8")
    return file


def saved(folder: Path, norm: str) -> Path:
    model = minigpt.from_pretrained("demo", device="cpu")
    minigpt.swap_norms(model, norm)
    minigpt.save_pretrained(model, folder, minigpt.Tokenizer.from_pretrained("demo"))
    return folder


def test_perplexity_is_by_the_norms_of_the_checkpoint(tmp_path: Path, text: Path) -> None:
    folder = saved(tmp_path / "dyt", "dyt")
    done = CliRunner().invoke(app, ["perplexity", str(folder), str(text), "--device", "cpu", "--json"])
    model, tokenizer = minigpt.from_pretrained(folder, device="cpu"), minigpt.Tokenizer.from_pretrained(folder)
    wanted = minigpt.perplexity(model, tokenizer, text.read_text(encoding="utf-8"))
    assert json.loads(done.stdout)["perplexity"] == pytest.approx(wanted)
    plain = minigpt.perplexity(
        minigpt.from_pretrained("demo", device="cpu"), tokenizer, text.read_text(encoding="utf-8")
    )
    assert wanted > 2 * plain


def test_parity_judges_a_foreign_norm_that_is_named_again(tmp_path: Path) -> None:
    folder = saved(tmp_path / "rms", "torch.nn:RMSNorm")
    with pytest.raises(minigpt.NormError, match="not a registered one"):
        minigpt.parity(folder, device="cpu")
    how = {"norm": torch.nn.RMSNorm, "device": "cpu", "prompts": ["Once upon"], "max_new_tokens": 4}
    again, fresh = minigpt.parity(folder, **how), minigpt.parity("demo", **how)
    assert again.distribution.kl_mean == pytest.approx(fresh.distribution.kl_mean, rel=1e-3)
