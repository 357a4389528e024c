"""Scales and shifts moved into the layers after the norms: another set of weights, the same function."""

import copy
from pathlib import Path

import helpers
import pytest
import torch
from helpers import assert_close, assert_same_bits, assert_within, random_ids, rms, small_model
from norm_classes import EmbDim
from torch import Tensor, nn
from torch.nn.utils import parametrize

from minigpt import LayerNorm, NormError, from_pretrained, save_pretrained, swap_norms
from minigpt.precision import HALVES
from minigpt.swap import fit_norms, fold_norms

EXACT = 1e-12  # of the largest logit, in float64

tied_or_not = pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])


class OnePlus(LayerNorm):
    """Multiplies by 1 + weight, as some models' norms do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.standardize(x)


@tied_or_not
@torch.no_grad()
def test_norms_are_bare_the_head_is_its_own_and_the_logits_stay(tied: bool, device: torch.device) -> None:
    model = small_model(dtype=torch.float64, device=device, tie_word_embeddings=tied)
    ids = random_ids(3, 40, device=device)
    expected = model(ids)
    shift, embedding = model.ln_f.bias / model.ln_f.weight, model.wte.weight.clone()
    assert fold_norms(model) is model
    assert_close(model(ids), expected, EXACT, "logits")
    for site, norm in model.norm_modules().items():
        assert (norm.weight == 1).all()
        assert (norm.bias == 0).all() or site == "ln_f"
    assert torch.equal(model.ln_f.bias, shift)
    assert not model.config.tie_word_embeddings
    assert torch.equal(model.wte.weight, embedding)
    assert dict(model.named_parameters()).keys() >= {"lm_head.weight"}
    assert "lm_head.bias" not in model.state_dict()


@pytest.mark.parametrize("norm", ["textbook", "std_eps", "rms", "dyt", "frozen", EmbDim, "torch.nn:LayerNorm"])
@torch.no_grad()
def test_whatever_the_norm_is(norm: str | type) -> None:
    model, ids = small_model(dtype=torch.float64), random_ids(4, 20)
    swap_norms(model, norm)
    if norm == "frozen":
        fit_norms(model, ids)
    expected = model(ids)
    fold_norms(model)
    assert_close(model(ids), expected, EXACT, "logits")
    bare = model.ln_f.weight, model.ln_f.bias
    swap_norms(model, "fused")
    assert (model.ln_f.weight, model.ln_f.bias) == bare


@tied_or_not
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@torch.no_grad()
def test_in_other_dtypes_it_is_off_by_no_more_than_rounding(dtype: torch.dtype, tied: bool) -> None:
    """Against float64 on the weights before folding: the products are rounded once more, by at most half a unit."""
    reference = helpers.reference_model(dtype=dtype, tie_word_embeddings=tied)
    ids = random_ids(4, 60)
    expected, model = helpers.in_float64(reference)(ids).logits, helpers.same_weights(reference)
    before = rms(model(ids).double() - expected)
    after = rms(fold_norms(model)(ids).double() - expected)
    assert_within(after, 2 * before, rms(expected), f"RMS error, {before:.3g} before")


@torch.no_grad()
def test_dimensions_without_a_scale() -> None:
    """A scale of 0 leaves the shift alone: in ln_f there is nothing to divide it by, so both stay."""
    model, ids = small_model(dtype=torch.float64), random_ids(2, 9)
    for norm in model.norm_modules().values():
        norm.weight[3], norm.weight[5], norm.weight[7] = 0, 0, 1e-320
        norm.bias[5] = 0
    expected, shift = model(ids), model.ln_f.bias[3].item()
    fold_norms(model)
    assert_close(model(ids), expected, EXACT, "logits")
    assert model.ln_f.weight[[3, 5]].tolist() == [0, 0]
    assert model.ln_f.weight[7] == 1e-320
    assert model.ln_f.bias[[3, 5]].tolist() == [shift, 0]
    assert (model.h[0].ln_1.weight == 1).all()


@torch.no_grad()
def test_the_mode_and_what_is_trained_stay() -> None:
    model = small_model().train()
    model.requires_grad_(False)
    model.h[0].attn.c_attn.weight.requires_grad_(True)
    fold_norms(model)
    assert all(module.training for module in model.modules())
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == ["h.0.attn.c_attn.weight"]


# Files.


@tied_or_not
@torch.no_grad()
def test_saved_it_is_a_gpt2_to_transformers_too(tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, ids = small_model(dtype=torch.float64, tie_word_embeddings=tied), random_ids(2, 30)
    expected = model(ids)
    save_pretrained(fold_norms(model), tmp_path)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert_close(hf(ids).logits, expected, EXACT, "transformers' logits")
    assert_same_bits(from_pretrained(tmp_path, device="cpu")(ids), model(ids), "loaded again")


# Refused.


@pytest.mark.parametrize("site", ["h.0.ln_1", "h.1.ln_2", "ln_f"])
@torch.no_grad()
def test_a_norm_that_does_not_scale_by_its_weight(site: str) -> None:
    model, ids = small_model(), random_ids(2, 9)
    swap_norms(model, OnePlus, site)
    expected = model(ids)
    with pytest.raises(NormError, match=rf"^{site} \(OnePlus\) must scale by its weight and shift by its bias"):
        fold_norms(model)
    assert_same_bits(model(ids), expected, "the model")
    assert model.config.tie_word_embeddings


@torch.no_grad()
def test_a_layer_of_another_kind() -> None:
    model = small_model()
    model.h[1].mlp.c_fc = nn.Linear(48, 192)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(NormError, match=r"h\.1\.mlp\.c_fc must be a Conv1D, got a Linear"):
        fold_norms(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@torch.no_grad()
def test_a_product_too_large_for_the_dtype() -> None:
    model = small_model(dtype=torch.float16)
    model.h[1].ln_1.weight[0], model.h[1].attn.c_attn.weight[0, 0] = 300, 300
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(NormError, match=r"before h\.1\.attn\.c_attn does not fit into it in torch\.float16; .* wider"):
        fold_norms(model)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert model.config.tie_word_embeddings


@pytest.mark.parametrize("name", ["h.0.mlp.c_fc", "h.1.attn.c_attn", "h.0.ln_2", "ln_f"])
def test_a_weight_that_is_computed_cannot_be_folded_into(name: str) -> None:
    model = small_model()
    parametrize.register_parametrization(model.get_submodule(name), "weight", nn.Hardtanh(-9, 9))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(NormError, match=f"weight or bias of {name} is not a Parameter"):
        fold_norms(model)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
