"""Norms swapped and fitted in models of other architectures: a site's own function leaves the logits as they are."""

import copy
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, HEADS, Architecture, random_model
from helpers import assert_same_bits, assert_within, rms
from torch import Tensor, nn

import minigpt
from minigpt.precision import Float64


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


OF_NEXT = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
NEXT = Architecture(
    transformers.Qwen3NextConfig,
    HEADS | OF_NEXT | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "rms", "model.norm",
)  # fmt: skip
OTHERS = [pytest.param(name, marks=pytest.mark.thorough) for name in ("gemma2", "gemma3", "qwen3_next")]


@pytest.mark.parametrize("name", ["gemma", "nemotron", *OTHERS])  # whose norms multiply by 1 + weight
@torch.no_grad()
def test_a_norm_that_multiplies_by_one_more_keeps_the_parameter(
    name: str, ids: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ARCHITECTURES, "qwen3_next", NEXT)
    model: Any = random_model(name)
    before, held, own = model(ids).logits, dict(model.named_parameters()), type(model.model.norm)
    same, kind = ("rms", "fused") if minigpt.norm_sites(model)["model.norm"].kind == "rms_norm" else ("textbook", "rms")
    for norm in (same, nn.RMSNorm if same == "rms" else nn.LayerNorm, same, own):
        sites = minigpt.swap_norms(model, norm)
        assert_within(rms(model(ids).logits - before), 1e-5 * rms(before), rms(before), str(norm))
        assert {k: id(v) for k, v in model.named_parameters()} == {k: id(v) for k, v in held.items()}
        model.save_pretrained(tmp_path / "saved")
        again = type(model).from_pretrained(tmp_path / "saved").eval()
        assert_within(rms(again(ids).logits - before), 1e-5 * rms(before), rms(before), f"{norm}, saved")
    assert {type(model.get_submodule(site)) for site in sites} == {own}
    minigpt.swap_norms(model, kind)
    assert rms(model(ids).logits - before) > 1e-3 * rms(before)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert_same_bits(copied(ids).logits, model(ids).logits, "copied and pickled")
    changed = {key: value + 0.01 for key, value in model.state_dict().items()}
    model.load_state_dict(changed)
    minigpt.swap_norms(model, own)
    torch.testing.assert_close(model.state_dict(), changed)


class RoundsTheRow(nn.Module):
    """Llama's norm, whose output has its weight's dtype if that is wider."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * nn.functional.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype)


@pytest.mark.parametrize("norm", ["rms", nn.RMSNorm, RoundsTheRow])
@torch.no_grad()
def test_the_sum_of_one_and_a_weight_is_not_rounded_to_half_precision(norm: Any) -> None:
    """In bfloat16, 1 + 2^-8 is 1. Outputs were 2.5 times as far off; a row that is rounded too is exactly halfway."""
    model = random_model("gemma").to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.fill_(2.0**-8)
    rows = torch.randn(1, 64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    truth = nn.functional.rms_norm(rows.double(), (32,), None, 1e-6) * (1 + 2.0**-8)
    own = rms(model.model.norm(rows).double() - truth)
    minigpt.swap_norms(model, norm)
    y = model.model.norm(rows)
    assert y.dtype == torch.bfloat16
    assert rms(y.double() - truth) <= (1.8 if norm is RoundsTheRow else 1.05) * own
    assert model(torch.tensor([[5, 17, 3]])).logits.dtype == torch.bfloat16


def test_training_goes_on_at_a_norm_that_multiplies_by_one_more(ids: Tensor) -> None:
    """Two steps with a swap between them are two steps without one."""
    plain = random_model("gemma").double()
    changed = copy.deepcopy(plain)
    for model in (plain, changed):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            with Float64():
                model(ids).logits.square().mean().backward()
            optimizer.step()
            if model is changed:
                minigpt.swap_norms(model, "rms")
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(changed.get_parameter(name), parameter, rtol=1e-9, atol=1e-9)


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


@pytest.mark.parametrize("norm", ["dyt", "rms", "frozen", "taper:0.5"])
def test_norms_of_heads_are_fitted(norm: str, ids: Tensor) -> None:
    """Their inputs have four dimensions: a row for each token and head."""
    model = random_model("qwen3")
    sites = minigpt.swap_norms(model, norm, "*.q_norm")
    explained = minigpt.fit_norms(model, ids)
    assert [*explained] == sites  # norms that nobody swapped are left out
    assert all(site.after > max(0.5, site.before - 1e-6) for site in explained.values())
    assert [*minigpt.fit_norms(model, ids, "model.norm")] == ["model.norm"]
    minigpt.swap_norms(model, norm)
    assert len(minigpt.fit_norms(model, ids)) == len(minigpt.norm_sites(model))


def test_a_third_of_blocks_without_a_number_is_refused() -> None:
    model = nn.Sequential(OrderedDict(embedding=nn.Embedding(96, 32), norm=nn.LayerNorm(32), head=nn.Linear(32, 96)))
    with pytest.raises(minigpt.NormError, match="no norm site matches 'early'; the sites are norm"):
        minigpt.swap_norms(model, "rms", "early")


class WithResidual(nn.RMSNorm):
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return super().forward(x if residual is None else x + residual)


class WithGate(nn.RMSNorm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x) if gate is None else super().forward(x) * gate


@torch.no_grad()
def test_an_optional_second_input_is_no_hindrance_and_a_gate_is(ids: Tensor) -> None:
    model: Any = random_model("qwen3")
    weight = model.model.norm.weight
    model.model.norm, model.model.gated_norm = WithResidual(32, 1e-6), WithGate(32)
    model.model.norm.weight = weight
    before = model(ids).logits
    assert "model.norm" in minigpt.swap_norms(model, "rms")
    assert "model.gated_norm" not in minigpt.norm_sites(model)
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(2, 32), (8, 16)])
def test_equal_rows_are_nothing_to_fit_to(shape: tuple[int, int]) -> None:
    """A text of one token, in a model without a table of positions."""
    model = random_model("llama")
    minigpt.swap_norms(model, "dyt")
    with pytest.raises(minigpt.NormError, match=r"input_layernorm \(DyT\) cannot be fitted: all rows .* are equal"):
        minigpt.fit_norms(model, torch.full(shape, 3))
