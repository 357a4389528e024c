"""The noise floor in half precision is that of the model that from_pretrained(dtype=) gives."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import random_model
from torch import Tensor

import minigpt

CPU = torch.device("cpu")
LONG = 256  # positions, so that rounded rotary frequencies turn the last ones by a large angle
SHARP = ("q_proj", "k_proj", "query", "c_attn", "query_key_value", "qkv_proj", "q_b_proj")
NAMES = [
    "llama", "mixtral", "qwen3", "gemma3", "phi", "phi3", "pythia", "gptj", "deepseek_v3", "falcon", "stablelm",
    "cohere", "olmo2", "rwkv", "gpt2",
]  # fmt: skip
QUICK = [("llama", "float16"), ("deepseek_v3", "bfloat16")]
EVERY = [
    pytest.param(name, dtype, marks=() if (name, dtype) in QUICK else pytest.mark.thorough)
    for name in NAMES
    for dtype in ("bfloat16", "float16")
]


def sharp_model(name: str) -> Any:
    """A model whose attention looks at few positions, so that these matter."""
    length = "n_positions" if name in ("gptj", "gpt2") else "max_position_embeddings"
    model = random_model(name, **{length: LONG})
    for path, parameter in model.named_parameters():
        if path.rpartition(".")[0].endswith(SHARP):
            parameter.data *= 4
    return model


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


@pytest.mark.parametrize(("name", "dtype"), EVERY)
def test_the_floor_is_that_of_from_pretrained(name: str, dtype: str, tmp_path: Path) -> None:
    """A cast of the whole model rounds tables that stay in float32 (Automodel#2549, transformers#30709)."""
    sharp_model(name).save_pretrained(tmp_path)
    ids = torch.randint(3, 96, (LONG,), generator=torch.Generator().manual_seed(3)).tolist()
    options: dict[str, Any] = dict(dtype=dtype, device="cpu", prompts=[ids], max_new_tokens=0)
    original = minigpt.Original(tmp_path, gradients=name != "rwkv", **options)  # which changes tensors in place
    real = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    with torch.no_grad():
        logits = real(torch.tensor([ids])).logits[0]
    floor = rms(logits.double() - original.truth.logits(original.truth.texts.prompts[0]))
    held = original.judge(real)
    measured = original.truth.floor.prompts.rms
    print(f"floor {measured:.4g}, from_pretrained's {floor:.4g}, ratio of it held {held.logits.ratio:.4f}")
    assert measured == pytest.approx(floor, rel=0.01)
    assert 0.97 < held.logits.ratio < 1.03
    assert held.passed
    for row in held.gradients or ():
        assert row.relative_error < 1.03 * original.truth.floor.gradients[row.parameter]


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", ["llama", pytest.param("gptj", marks=pytest.mark.thorough)])
def test_the_error_of_another_precision_is_that_of_from_pretrained(name: str, dtype: str, tmp_path: Path) -> None:
    """Of a record in float32, whose report says whose precision an error is like."""
    sharp_model(name).save_pretrained(tmp_path)
    ids = torch.randint(3, 96, (LONG,), generator=torch.Generator().manual_seed(3)).tolist()
    original = minigpt.Original(tmp_path, dtype="float32", device="cpu", prompts=[ids], max_new_tokens=0)
    real = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    with torch.no_grad():
        error = rms(
            real(torch.tensor([ids])).logits[0].double() - original.truth.logits(original.truth.texts.prompts[0])
        )
    print(f"{dtype}: {original.truth.floor.precisions[dtype]:.4g}, from_pretrained's {error:.4g}")
    assert original.truth.floor.precisions[dtype] == pytest.approx(error, rel=0.01)


def test_a_model_that_was_cast_whole_is_told_so(tmp_path: Path) -> None:
    sharp_model("llama").save_pretrained(tmp_path)
    ids = torch.randint(3, 96, (LONG,), generator=torch.Generator().manual_seed(3)).tolist()
    minigpt.Original(tmp_path, dtype="float16", device="cpu", prompts=[ids], max_new_tokens=0).save(tmp_path / "record")
    original = minigpt.Original.load(tmp_path / "record", device="cpu")
    assert original.truth.facts.kept == {
        "model.rotary_emb.inv_freq": "float32",
        "model.rotary_emb.original_inv_freq": "float32",
    }
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float16").eval()
    assert original.judge(model).notes == []
    (note,) = original.judge(model.to(torch.float16)).notes
    assert note.startswith("from_pretrained(dtype=) keeps model.rotary_emb.inv_freq, ")
