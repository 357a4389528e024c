"""A checkpoint described: its facts are those that transformers counts, and it is refused as loading refuses it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import random_model
from checkpoints import edit_tensors, reference, saved, tiny_bpe

from minigpt import CheckpointError
from minigpt.checkpoint import Files
from minigpt.checkpoint.pretrained import describe_checkpoint
from minigpt.checkpoint.transformers_model import describe_other
from minigpt.cli.commands import app_of


@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": False}, {"n_inner": 50}, {"n_layer": 3}], ids=str)
def test_the_facts_are_transformers(tmp_path: Path, fields: dict[str, Any]) -> None:
    model = reference(**fields)
    facts, config = describe_checkpoint(Files.at(saved(model, tmp_path))), model.config
    assert (facts["layers"], facts["heads"], facts["width"]) == (config.n_layer, config.n_head, config.n_embd)
    assert (facts["context"], facts["vocabulary"]) == (config.n_positions, config.vocab_size)
    assert (facts["activation"], facts["norm eps"]) == (config.activation_function, config.layer_norm_epsilon)
    assert (facts["inner width"], facts["tied head"]) == (config.n_inner or 128, config.tie_word_embeddings)
    assert (facts["parameters"], facts["dtype"]) == (model.num_parameters(), "float32")
    assert (facts["files"], facts["format"]) == (str(tmp_path), "Hugging Face, model.safetensors")
    sites = [f"h.{i}.{norm}" for i in range(config.n_layer) for norm in ("ln_1", "ln_2")] + ["ln_f"]
    assert list(facts["norms"]) == sites
    for site, ranges in facts["norms"].items():
        for name, parameter in model.transformer.get_submodule(site).named_parameters():
            assert ranges[name] == (parameter.min().item(), parameter.max().item())


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    saved(reference(), tmp_path)
    edit_tensors(tmp_path, lambda tensors: {name: tensors[name] for name in tensors if "ln_f.bias" not in name})
    with pytest.raises(CheckpointError, match=r"does not hold this model's tensors: missing ln_f\.bias$"):
        describe_checkpoint(Files.at(tmp_path))


def test_nan_and_infinity_are_named(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors["transformer.h.1.ln_2.bias"][3] = torch.nan
        tensors["transformer.wpe.weight"][5, 7] = -torch.inf
        return tensors

    facts = describe_checkpoint(Files.at(edit_tensors(saved(reference(), tmp_path), spoil)))
    assert sorted(facts["not finite"]) == ["h.1.ln_2.bias", "wpe.weight"]


def test_info_counts_the_tokens_and_names_those_without_an_embedding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(reference(vocab_size=300), tmp_path)
    backend = tiny_bpe(290)
    backend.save(str(tmp_path / "tokenizer.json"))
    app_of(["info"])(["info", str(tmp_path)], standalone_mode=False)
    shown = capsys.readouterr().out.split("\n")
    assert any(line.split() == ["tokenizer", "byte-level", "BPE", "of", "290", "tokens"] for line in shown)
    assert any(line.split() == ["of", "it", "used", "290"] for line in shown)
    backend.add_tokens([f"<tool {i}>" for i in range(11)])
    backend.save(str(tmp_path / "tokenizer.json"))
    app_of(["info"])(["info", str(tmp_path)], standalone_mode=False)
    assert "301 tokens; the model has no embedding for <tool 10>" in " ".join(capsys.readouterr().out.split())


def test_another_architecture_is_described_without_its_weights(tmp_path: Path) -> None:
    model = random_model("gemma3")
    model.save_pretrained(tmp_path)
    facts = describe_other(tmp_path)
    assert facts["architecture"] == "gemma3_text, Gemma3ForCausalLM of transformers"
    assert facts["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert {name: facts[name] for name in ("layers", "width", "context", "vocabulary", "dtype")} == {
        "layers": 2, "width": 32, "context": 40, "vocabulary": 96, "dtype": "float32",
    }  # fmt: skip
    assert facts["norms"][0] == "model.layers.*.self_attn.q_norm: 2 rms_norm, eps 1e-06, 1 + weight"
    assert facts["norms"][-1] == "model.norm: 1 rms_norm, eps 1e-06, 1 + weight"
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no safetensors file"):
        describe_other(tmp_path)


def test_a_norm_of_no_known_kind_is_described_without_an_eps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("llama")
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(type(model.model.norm), "forward", lambda norm, x: norm.weight * x.tanh())
    assert describe_other(tmp_path)["norms"][-1] == "model.norm: 1 other"
