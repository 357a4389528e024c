"""What a checkpoint is: told as transformers counts it, and refused where it is not one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_config, edit_tensors, reference, saved, tiny_bpe

from minigpt.report.describe import describe
from minigpt.report.numerals import brief


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(reference(), tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": False}, {"n_inner": 50}, {"n_layer": 3}], ids=str)
def test_the_facts_are_transformers(tmp_path: Path, fields: dict[str, Any]) -> None:
    model = reference(**fields)
    facts, config = describe(saved(model, tmp_path)), model.config
    assert (facts["layers"], facts["heads"], facts["width"]) == (config.n_layer, config.n_head, config.n_embd)
    assert (facts["context"], facts["vocabulary"]) == (config.n_positions, config.vocab_size)
    assert (facts["activation"], facts["norm eps"]) == (config.activation_function, config.layer_norm_epsilon)
    assert (facts["inner width"], facts["tied head"]) == (config.n_inner or 128, config.tie_word_embeddings)
    assert facts["parameters"] == model.num_parameters()
    assert (facts["model"], facts["files"]) == (str(tmp_path), str(tmp_path))


def test_every_norm_with_the_range_of_its_parameters(folder: Path) -> None:
    lines, norms = describe(folder)["norms"], reference().transformer
    assert [line.partition(":")[0] for line in lines] == ["h.0.ln_1", "h.0.ln_2", "h.1.ln_1", "h.1.ln_2", "ln_f"]
    for line in lines:
        for parameter in norms.get_submodule(line.partition(":")[0]).parameters():
            assert brief(parameter.min().item()) in line
            assert brief(parameter.max().item()) in line


def test_what_would_be_refused_and_why(tmp_path: Path) -> None:
    """One reason after another is added, and what is known besides is still told."""
    facts = describe(saved(reference(), tmp_path))
    assert (facts["refused"], facts["not finite"], facts["tokenizer"]) == ([], [], "none")

    edit_tensors(tmp_path, lambda tensors: {name: tensors[name] for name in tensors if "ln_f.bias" not in name})
    facts = describe(tmp_path)
    assert [reason.partition("tensors: ")[2] for reason in facts["refused"]] == ["missing ln_f.bias"]
    assert facts["norms"][-1].startswith("ln_f: weight")
    assert "bias" not in facts["norms"][-1]

    edit_tensors(tmp_path, lambda tensors: tensors | {"score.weight": torch.ones(2, 32)})
    (reason,) = describe(tmp_path)["refused"]
    assert reason.endswith("missing ln_f.bias; unexpected score.weight")

    edit_config(tmp_path, model_type="llama")
    facts = describe(tmp_path)
    assert ["llama" in reason for reason in facts["refused"]] == [True]
    assert facts["dtype"] == "float32"

    (tmp_path / "model.safetensors").write_bytes(b"x")
    (tmp_path / "config.json").write_text('{"n_layer": 3}')
    facts = describe(tmp_path)
    assert ["cannot be read as a .safetensors file" in reason for reason in facts["refused"]] == [True]
    assert facts["layers"] == 3


def test_nan_and_infinity_are_named(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors["transformer.h.1.ln_2.bias"][3] = torch.nan
        tensors["transformer.wpe.weight"][5, 7] = -torch.inf
        return tensors

    facts = describe(edit_tensors(saved(reference(), tmp_path), spoil))
    assert sorted(facts["not finite"]) == ["h.1.ln_2.bias", "wpe.weight"]
    assert facts["refused"] == []


def test_the_tokenizer_beside_it(tmp_path: Path) -> None:
    saved(reference(vocab_size=320), tmp_path)
    tiny_bpe(300).save(str(tmp_path / "tokenizer.json"))
    facts = describe(tmp_path)
    assert facts["tokenizer"] == "byte-level BPE of 300 tokens"
    assert (facts["vocabulary"], facts["of it used"]) == (320, 300)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert describe(tmp_path)["tokenizer"].startswith("refused: ")
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert describe(tmp_path)["tokenizer"] == "none"  # as convert, which takes none along
