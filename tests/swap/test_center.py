"""Centring what writes to the residual stream: the logits stay, and RMSNorm becomes LayerNorm."""

from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import saved
from helpers import assert_close, assert_same_bits, assert_within, random_ids, reference_model, small_model
from torch import nn

import minigpt
from minigpt import ConfigError, NormError, center_writers, swap_norms

SHAPES = [{}, {"tie_word_embeddings": False}, {"n_layer": 1}, {"n_embd": 4, "n_head": 1}, {"layer_norm_epsilon": 1e-2}]


@pytest.mark.parametrize("fields", SHAPES, ids=str)
@torch.no_grad()
def test_in_float64_the_logits_stay_and_rms_gives_them_too(fields: dict[str, object]) -> None:
    model, ids = small_model(dtype=torch.float64, **fields), random_ids(3, 20)
    expected = model(ids)
    assert center_writers(model) is model
    assert_within((model(ids) - expected).abs().max().item(), 1e-11, expected.abs().max().item(), "centred")
    swap_norms(model, "rms")
    assert_within((model(ids) - expected).abs().max().item(), 1e-11, expected.abs().max().item(), "with RMSNorm")
    x = model.embed(ids, torch.arange(ids.shape[1])[None])
    for block in model.h:
        x = block(x)
        assert_within(x.mean(-1).abs().max().item(), 1e-13, x.abs().max().item(), "mean of the residual stream")


@pytest.mark.parametrize("fields", SHAPES[:3], ids=str)
def test_parity_passes_at_the_noise_floor(fields: dict[str, object], tmp_path: Path) -> None:
    place = saved(reference_model(**fields), tmp_path)
    prompts = random_ids(4, 24).tolist()
    actual = [
        minigpt.parity(place, norm="rms", center=center, prompts=prompts, max_new_tokens=8, device="cpu")
        for center in (False, True)
    ]
    assert [report.passed for report in actual] == [False, True]
    assert_within(actual[1].logits.ratio, 2, 1, "ratio to the noise floor")
    assert any("centred first" in note for note in actual[1].notes)


@torch.no_grad()
def test_transformers_reads_what_is_saved(tmp_path: Path) -> None:
    model, ids = minigpt.from_pretrained("demo", device="cpu"), random_ids(2, 40)
    expected = minigpt.from_pretrained("demo", device="cpu", dtype="float64")(ids)
    minigpt.save_pretrained(center_writers(model), tmp_path)
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(hf).__name__ == "GPT2LMHeadModel"
    assert_close(hf(ids).logits.double(), expected, 1e-5, "in transformers")
    again = minigpt.from_pretrained(tmp_path, device="cpu", arithmetic="reference")
    assert_same_bits(again(ids), hf(ids).logits, "read again")
    swap_norms(again, "rms")
    assert_close(again(ids).double(), expected, 1e-5, "with RMSNorm")


def test_what_cannot_be_centred_is_said_and_nothing_changes() -> None:
    for norm in ("rms", "dyt"):
        model = small_model(norm)
        before = {name: single.clone() for name, single in model.state_dict().items()}
        with pytest.raises(NormError, match=r"h\.0\.ln_1 \(.*\) must subtract the mean of its rows"):
            center_writers(model)
        assert all(torch.equal(single, before[name]) for name, single in model.state_dict().items())
    with pytest.raises(ConfigError, match=r"must be a minigpt\.GPT2"):
        center_writers(nn.Linear(2, 2))  # type: ignore[arg-type]


def test_convert_centres_before_it_swaps(tmp_path: Path) -> None:
    from minigpt.cli.convert import convert

    convert(minigpt.Recipe(norm="rms", center=True), tmp_path / "rms")
    model, ids = minigpt.from_pretrained(tmp_path / "rms", device="cpu"), random_ids(2, 30)
    with torch.no_grad():
        assert_close(model(ids), minigpt.from_pretrained("demo", device="cpu")(ids), 1e-5, "logits")
    assert type(model.ln_f).__name__ == "RMSNorm"
