"""Norms swapped and fitted in models of other architectures: a site's own function leaves the logits as they are."""

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, random_model
from torch import Tensor, nn

import minigpt


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(96, (3, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "gemma", "gemma3", "olmo", "olmo2", "phi", "pythia", "bloom", "gpt2", "nemotron"]
)
@torch.no_grad()
def test_the_sites_own_function_changes_nothing_and_another_does(name: str, ids: Tensor) -> None:
    model, same = random_model(name), ARCHITECTURES[name].norm
    same, other = ("rms", "fused") if same == "rms" else ("textbook", "rms")
    sites, before = [*minigpt.norm_sites(model)], model(ids).logits
    assert minigpt.swap_norms(model, same) == sites
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-5)
    minigpt.swap_norms(model, other)
    assert (model(ids).logits - before).abs().max() > 1e-3
    minigpt.swap_norms(model, same)
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-5)


def test_patterns_are_over_the_paths_that_transformers_prints() -> None:
    model = random_model("qwen3", num_hidden_layers=3)
    assert minigpt.swap_norms(model, "rms", "*.q_norm") == [f"model.layers.{i}.self_attn.q_norm" for i in range(3)]
    middle = minigpt.swap_norms(model, "rms", "middle")
    assert {path.split(".")[2] for path in middle} == {"1"}
    assert len(middle) == 4
    with pytest.raises(minigpt.NormError, match=r"no norm site matches 'ln_f'; the sites are model\.layers\.0"):
        minigpt.swap_norms(model, "rms", "ln_f")


def test_many_sites_are_named_by_their_patterns() -> None:
    with torch.device("meta"):
        config = ARCHITECTURES["llama"].config(**ARCHITECTURES["llama"].fields | {"num_hidden_layers": 16})
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(minigpt.NormError) as caught:
        minigpt.swap_norms(model, "rms", "ln_f")
    patterns = "model.layers.*.input_layernorm, model.layers.*.post_attention_layernorm, model.norm"
    assert str(caught.value) == f"no norm site matches 'ln_f'; the sites are {patterns}"


@torch.no_grad()
def test_a_site_keeps_its_own_eps(ids: Tensor) -> None:
    model = random_model("llama", rms_norm_eps=1e-3)
    minigpt.swap_norms(model, "fused", "model.norm")
    assert model.model.norm.eps == pytest.approx(1e-3)
    minigpt.swap_norms(model, "rms", "model.norm")
    assert model.model.norm.eps == pytest.approx(1e-3)


def test_a_norm_that_multiplies_by_one_more_gets_a_weight_of_its_own() -> None:
    model = random_model("gemma")
    before = model.model.norm.weight.detach().clone()
    minigpt.swap_norms(model, "rms", "model.norm")
    torch.testing.assert_close(model.model.norm.weight.detach(), before + 1)
    minigpt.swap_norms(model, "textbook", "model.norm")
    torch.testing.assert_close(model.model.norm.weight.detach(), before + 1)


@pytest.mark.parametrize("name", ["llama", "gemma", "pythia"])
def test_norms_are_fitted_to_those_that_they_replace(name: str, ids: Tensor) -> None:
    model = random_model(name)
    sites = minigpt.swap_norms(model, "dyt")
    explained = minigpt.fit_norms(model, ids)
    assert [*explained] == sites
    assert all(site.after > max(site.before, 0.5) for site in explained.values())


def test_a_module_without_norms_is_refused() -> None:
    for thing in (nn.Linear(2, 2), "demo"):
        with pytest.raises(minigpt.ConfigError, match="a language model of transformers with norms, got a"):
            minigpt.swap_norms(thing, "rms")


def test_frozen_norms_say_that_a_model_of_transformers_tells_no_positions(caplog: pytest.LogCaptureFixture) -> None:
    minigpt.swap_norms(random_model("llama"), "frozen")
    assert "count positions from 0 in each call" in caplog.text


@torch.no_grad()
def test_a_norm_that_stands_at_two_paths_is_replaced_at_both(ids: Tensor) -> None:
    model = random_model("llama")
    layers = model.model.layers
    layers[1].input_layernorm = layers[0].input_layernorm
    before = model(ids).logits
    assert minigpt.swap_norms(model, "fused", "*.input_layernorm") == ["model.layers.0.input_layernorm"]
    assert layers[1].input_layernorm is layers[0].input_layernorm
    assert (model(ids).logits - before).abs().max() > 1e-3
    minigpt.fit_norms(model, ids)
    minigpt.swap_norms(model, "rms", "*.input_layernorm")
    assert layers[1].input_layernorm is layers[0].input_layernorm
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-5)


class Meter:
    """A hook that holds a model, which must not be copied with it."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.calls = model, 0

    def __deepcopy__(self, memo: object) -> "Meter":
        raise AssertionError

    def hook(self, *_: object) -> None:
        self.calls += 1


def test_hooks_are_neither_run_nor_copied_as_norms_are_probed_tried_and_fitted(ids: Tensor) -> None:
    model = random_model("llama")
    minigpt.swap_norms(model, "dyt", "model.norm")
    meter = Meter(model)
    for path in minigpt.norm_sites(model):
        model.get_submodule(path).register_forward_hook(meter.hook)
        model.get_submodule(path).register_forward_pre_hook(meter.hook)
    minigpt.norm_sites(model)
    assert meter.calls == 0
    minigpt.fit_norms(model, ids, "model.norm")
    assert meter.calls == 2 * 4  # of the norms before it, which run
    minigpt.swap_norms(model, nn.RMSNorm)
    assert meter.calls == 2 * 4
