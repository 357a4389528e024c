"""What of a checkpoint's files transformers reads, under which names, and what it leaves out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import random_model
from checkpoints import reference, saved
from foreign import write_nanogpt
from safetensors.torch import save_model

import minigpt

PROMPTS = [[5, 17, 3, 58, 41, 9], [60, 2, 2, 33]]
FEW: Any = dict(prompts=PROMPTS, max_new_tokens=2, device="cpu")


@pytest.mark.parametrize("memory", [None, pytest.param(0, marks=pytest.mark.thorough)])
def test_tensors_that_transformers_leaves_out_are_named(memory: int | None, tmp_path: Path) -> None:
    """config.json says that there are no biases, and one layer less than the files have."""
    random_model("llama", mlp_bias=True, num_hidden_layers=3).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    fields = json.loads(config.read_text()) | {"mlp_bias": False, "num_hidden_layers": 2}
    config.write_text(json.dumps(fields))
    report = minigpt.Original(tmp_path, memory=memory, **FEW).judge()
    assert report.outcome == "PASS"
    [note] = [note for note in report.notes if "leaves out" in note]
    assert "LlamaForCausalLM" in note
    assert "model.layers.*.mlp.down_proj.bias" in note
    assert "model.layers.*.input_layernorm.weight" in note


def test_the_tensors_that_a_candidate_leaves_out_are_named_too(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path / "whole")
    random_model("llama", mlp_bias=True).save_pretrained(tmp_path / "more")
    config = tmp_path / "more" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"mlp_bias": False}))
    truth = minigpt.Original(tmp_path / "whole", **FEW)
    assert not truth.judge().notes
    assert "mlp.up_proj.bias" in " ".join(truth.judge(tmp_path / "more").notes)


@pytest.mark.parametrize("memory", [None, pytest.param(0, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.thorough), "llama"])
def test_a_tied_matrix_may_have_the_heads_name(name: str, memory: int | None, tmp_path: Path) -> None:
    """``save_model`` of safetensors keeps one of two tied names, the first in the alphabet."""
    model = random_model(name, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    save_model(model, str(tmp_path / "model.safetensors"), metadata={"format": "pt"})
    assert minigpt.Original(tmp_path, memory=memory, **FEW).judge(model).outcome == "PASS"
    if name == "gpt2":
        ids = torch.tensor(PROMPTS[:1])
        ours = minigpt.from_pretrained(tmp_path, arithmetic="reference", device="cpu")
        torch.testing.assert_close(ours(ids), model(ids).logits, rtol=1e-5, atol=1e-6)
        assert [*ours.state_dict()].count("lm_head.weight") == 0


@pytest.mark.parametrize("has_config", [False, True])
def test_a_trainers_file_is_converted_before_it_is_judged(has_config: bool, tmp_path: Path) -> None:
    """transformers reads neither its layout nor its config. As a candidate it is judged."""
    hf_model = reference(activation_function="gelu")
    file = write_nanogpt(hf_model, tmp_path)
    if has_config:
        hf_model.config.save_pretrained(tmp_path)
    said = r"nanoGPT, so transformers .* `minigpt convert .* FOLDER` writes"
    with pytest.raises(minigpt.CheckpointError, match=said):
        minigpt.parity(file, **FEW)
    place = saved(hf_model, tmp_path / "hf")
    assert minigpt.parity(file, against=place, **FEW).outcome != "FAIL"


def test_another_dtype_in_the_config_of_a_gpt2_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers rounds the weights to it."""
    place = saved(reference(), tmp_path)
    minigpt.from_pretrained(place)
    assert not caplog.records
    config = place / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "float16"}))
    assert minigpt.from_pretrained(place, device="cpu").dtype == torch.float32
    assert "config.json says float16, and its weights are float32" in caplog.text


def test_a_file_without_a_config_that_transformers_reads_is_converted_too(tmp_path: Path) -> None:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4))
    torch.save({"model": model.state_dict(), "config": model.config.to_dict()}, tmp_path / "ckpt.pt")
    with pytest.raises(minigpt.CheckpointError, match=r"has no config\.json"):
        minigpt.parity(tmp_path / "ckpt.pt", **FEW)
