"""The bundled demo model: small, trained with its norms, and a teller of tales that hold together."""

import math

import pytest
import torch
from demo import tales, train

import minigpt
from minigpt.checkpoint.contents import DEMO

FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def model() -> minigpt.GPT2:
    return minigpt.from_pretrained("demo", device="cpu")


@pytest.fixture(scope="module")
def tokenizer() -> minigpt.Tokenizer:
    return minigpt.Tokenizer.from_pretrained("demo")


def test_it_fits_in_the_wheel() -> None:
    assert {path.name for path in DEMO.iterdir()} == FILES
    assert sum(path.stat().st_size for path in DEMO.iterdir()) <= 4_000_000


def test_the_preset_is_its_config(model: minigpt.GPT2) -> None:
    assert minigpt.GPT2Config.preset("demo") == model.config
    assert minigpt.GPT2Config.from_json_file(DEMO / "config.json") == model.config


def test_its_norms_are_far_from_untrained(model: minigpt.GPT2) -> None:
    """A norm that ignores its weight, or its bias, must change this model's logits."""
    for site in model.site_names():
        weight, bias = model.get_parameter(f"{site}.weight"), model.get_parameter(f"{site}.bias")
        from_one, from_zero = (weight - 1).abs().mean().item(), bias.abs().mean().item()
        print(f"{site}: mean |weight - 1| {from_one:.3f}, mean |bias| {from_zero:.3f}, spread {weight.std():.3f}")
        assert from_one > 0.1
        assert from_zero > 0.02
        assert weight.std() > 0.05


def test_it_expects_tales_it_has_never_seen(model: minigpt.GPT2, tokenizer: minigpt.Tokenizer) -> None:
    """An untrained model's perplexity is its vocabulary, 1024. The bound is a little above what training reaches."""
    texts = tales.tales(60, train.HELD_OUT)
    ids = torch.tensor(list(train.rows(texts, tokenizer, model.config.n_positions + 1)))
    with torch.no_grad():
        perplexity = math.exp(train.loss_on(model, ids).item())
    print(f"perplexity {perplexity:.3f}")
    assert perplexity < 1.25
