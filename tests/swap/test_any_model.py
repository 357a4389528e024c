"""Norms swapped and fitted in models of other architectures: a site's own function leaves the logits as they are."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import minigpt

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64,
}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 2}
MODELS: dict[str, tuple[Any, str, str]] = {  # the config, the norm that each site computes, and one that it does not
    "llama": (transformers.LlamaConfig(**GROUPED, rms_norm_eps=1e-3), "rms", "fused"),
    "qwen3": (transformers.Qwen3Config(**GROUPED, head_dim=8), "rms", "fused"),
    "gemma": (transformers.GemmaConfig(**GROUPED, head_dim=8), "rms", "fused"),
    "gemma3": (transformers.Gemma3TextConfig(**GROUPED, head_dim=8), "rms", "fused"),
    "olmo2": (transformers.Olmo2Config(**SIZES), "rms", "fused"),
    "olmo": (transformers.OlmoConfig(**SIZES), "fused", "rms"),
    "phi": (transformers.PhiConfig(**SIZES), "fused", "rms"),
    "pythia": (transformers.GPTNeoXConfig(**SIZES, layer_norm_eps=1e-3), "fused", "rms"),
    "bloom": (transformers.BloomConfig(vocab_size=96, hidden_size=32, n_layer=3, n_head=4), "textbook", "rms"),
    "gpt2": (transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=3, n_head=4, n_positions=64), "textbook", "rms"),
}


def model_of(name: str) -> Any:
    """A small model, every norm of which has a scale and shift of its own."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name][0]).eval()
    with torch.no_grad():
        for path in minigpt.norm_sites(model):
            for parameter in model.get_submodule(path).parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(96, (3, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_the_sites_own_function_changes_nothing_and_another_does(name: str, ids: Tensor) -> None:
    model, (_, same, other) = model_of(name), MODELS[name]
    sites, before = [*minigpt.norm_sites(model)], model(ids).logits
    assert minigpt.swap_norms(model, same) == sites
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-5)
    minigpt.swap_norms(model, other)
    assert (model(ids).logits - before).abs().max() > 1e-3
    minigpt.swap_norms(model, same)
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-5)


def test_patterns_are_over_the_paths_that_transformers_prints() -> None:
    model = model_of("qwen3")
    assert minigpt.swap_norms(model, "rms", "*.q_norm") == [f"model.layers.{i}.self_attn.q_norm" for i in range(3)]
    middle = minigpt.swap_norms(model, "rms", "middle")
    assert {path.split(".")[2] for path in middle} == {"1"}
    assert len(middle) == 4
    with pytest.raises(minigpt.NormError, match=r"no norm site matches 'ln_f'; the sites are model\.layers\.0"):
        minigpt.swap_norms(model, "rms", "ln_f")


@torch.no_grad()
def test_a_site_keeps_its_own_eps(ids: Tensor) -> None:
    model = model_of("llama")
    minigpt.swap_norms(model, "fused", "model.norm")
    assert model.model.norm.eps == pytest.approx(1e-3)
    minigpt.swap_norms(model, "rms", "model.norm")
    assert model.model.norm.eps == pytest.approx(1e-3)


def test_a_norm_that_multiplies_by_one_more_gets_a_weight_of_its_own() -> None:
    model = model_of("gemma")
    before = model.model.norm.weight.detach().clone()
    minigpt.swap_norms(model, "rms", "model.norm")
    torch.testing.assert_close(model.model.norm.weight.detach(), before + 1)
    minigpt.swap_norms(model, "textbook", "model.norm")
    torch.testing.assert_close(model.model.norm.weight.detach(), before + 1)


@pytest.mark.parametrize("name", ["llama", "gemma", "pythia"])
def test_norms_are_fitted_to_those_that_they_replace(name: str, ids: Tensor) -> None:
    model = model_of(name)
    sites = minigpt.swap_norms(model, "dyt")
    explained = minigpt.fit_norms(model, ids)
    assert [*explained] == sites
    assert all(site.after > max(site.before, 0.5) for site in explained.values())


def test_a_module_without_norms_is_refused() -> None:
    for thing in (nn.Linear(2, 2), "demo"):
        with pytest.raises(minigpt.ConfigError, match="a language model of transformers with norms, got a"):
            minigpt.swap_norms(thing, "rms")


def test_frozen_norms_say_that_a_model_of_transformers_tells_no_positions(caplog: pytest.LogCaptureFixture) -> None:
    minigpt.swap_norms(model_of("llama"), "frozen")
    assert "count positions from 0 in each call" in caplog.text
