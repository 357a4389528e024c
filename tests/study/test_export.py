"""A model with frozen norms as a plain GPT-2."""

import pytest
import torch
import transformers

import minigpt
from minigpt.checkpoint import read_checkpoint, read_stable
from minigpt.study.export import save_frozen


def frozen(ids):
    """The demo with norms that divide every position by one constant, which they take from ids."""
    model = minigpt.from_pretrained("demo", device="cpu")
    minigpt.swap_norms(model, "frozen")
    minigpt.fit_norms(model, ids)
    for norm in model.norm_modules().values():
        norm.freeze(norm.calibration[0], norm.calibration[0])
    return model


def test_transformers_loads_frozen_norms(tmp_path, caplog):
    ids = torch.randint(0, 1000, (2, 40), generator=torch.Generator().manual_seed(0))
    model = frozen(ids)
    save_frozen(model, tmp_path)
    assert not [record for record in caplog.records if record.name == "minigpt"]

    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    again = minigpt.from_pretrained(tmp_path, device="cpu")
    with torch.no_grad():
        plain, ours, loaded = hf(ids).logits, model(ids), again(ids)
        truth = hf.double()(ids).logits
    floor = (plain - truth).square().mean().sqrt()
    for logits in (ours, loaded):
        assert (logits - truth).square().mean().sqrt() <= 2 * floor
    assert type(again.ln_f).__name__ == "FrozenLayerNorm"
    assert read_stable(tmp_path, read_checkpoint).norms == [("*", "frozen")]


def test_parity_judges_the_plain_form_as_its_own_original(tmp_path):
    text, tokenizer = tmp_path / "text.txt", minigpt.Tokenizer.from_pretrained("demo")
    text.write_text("The old sailor told Mara a tale of the sea. " * 20)
    save_frozen(frozen(torch.tensor([tokenizer.encode(text.read_text())[:100]])), tmp_path / "plain", tokenizer)

    report = minigpt.parity(tmp_path / "plain", device="cpu", text=text)
    assert report.to_dict()["verdict"] == "pass"
    assert report.bitwise.max_abs_error < 1e-3 * report.logits.scale  # ours of the original is the same network
    assert report.perplexity is not None
    assert report.perplexity.candidate == pytest.approx(report.perplexity.reference, rel=1e-4)


def test_two_deviations_have_no_plain_form(tmp_path):
    model = minigpt.from_pretrained("demo", device="cpu")
    minigpt.swap_norms(model, "frozen")
    for norm in model.norm_modules().values():
        norm.freeze(torch.tensor(100.0), torch.tensor(2.0))
    with pytest.raises(minigpt.NormError, match="first@STEP"):
        save_frozen(model, tmp_path)
