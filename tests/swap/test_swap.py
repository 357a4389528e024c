"""Other norms at chosen sites of a model that is already loaded: shared Parameters, and a way back."""

import copy

import pytest
import torch
from helpers import assert_same_bits, assert_within, left_padding, random_ids, rms, small_model
from norm_classes import Doubling, EmbDim
from torch import nn
from torch.nn.utils import prune

import minigpt
from minigpt import GPT2, NormError, swap_norms
from minigpt.norms.textbook import FusedLayerNorm


def test_a_class_with_an_eps_of_its_own_is_said_to_have_it(caplog: pytest.LogCaptureFixture) -> None:
    model = small_model(layer_norm_epsilon=1e-3)
    swap_norms(model, "textbook")
    assert not caplog.messages
    swap_norms(model, EmbDim)
    assert caplog.messages == ["eps is 1e-05 in EmbDim, where the model's is 0.001"]
    caplog.clear()
    swap_norms(small_model(), EmbDim)
    assert not caplog.messages


SITES = ["h.0.ln_1", "h.0.ln_2", "h.1.ln_1", "h.1.ln_2", "h.2.ln_1", "h.2.ln_2", "ln_f"]


@pytest.fixture
def model() -> GPT2:
    return small_model(n_layer=3)


def kinds(model: GPT2) -> dict[str, type[nn.Module]]:
    return {site: type(model.get_submodule(site)) for site in model.site_names()}


def swapped(model: GPT2, kind: type[nn.Module]) -> list[str]:
    return [site for site, actual in kinds(model).items() if actual is kind]


@pytest.mark.parametrize(
    ("pattern", "sites"),
    [
        ("*", SITES),
        ("ln_f", ["ln_f"]),
        ("transformer.ln_f", ["ln_f"]),
        ("h.*.ln_1", ["h.0.ln_1", "h.1.ln_1", "h.2.ln_1"]),
        ("h.[0-1].ln_2", ["h.0.ln_2", "h.1.ln_2"]),
        (["ln_f", "h.0.*"], ["h.0.ln_1", "h.0.ln_2", "ln_f"]),
        (["h.1.ln_1", "h.1.*", "*ln_1"], ["h.0.ln_1", "h.1.ln_1", "h.1.ln_2", "h.2.ln_1"]),
    ],
    ids=str,
)
def test_the_sites_that_a_pattern_names_and_no_others(
    model: GPT2, pattern: str | list[str] | tuple[str, ...], sites: list[str]
) -> None:
    assert swap_norms(model, Doubling, pattern) == sites
    assert swapped(model, Doubling) == sites
    assert swapped(model, FusedLayerNorm) == [site for site in SITES if site not in sites]


@pytest.mark.parametrize("pattern", ["h.3.ln_1", "transformer.h.3.ln_1", "", ("ln_f", "h.7.ln_1")])
def test_a_pattern_that_matches_nothing_lists_the_sites(model: GPT2, pattern: str) -> None:
    with pytest.raises(NormError, match=rf"^no norm site matches '.*'; the sites are {', '.join(SITES)}$"):
        swap_norms(model, "textbook", pattern)
    assert swapped(model, FusedLayerNorm) == SITES


def test_a_norm_that_cannot_be_built_at_the_last_site_leaves_the_model_as_it_was(model: GPT2) -> None:
    built = []

    def six_times(shape: tuple[int, ...], eps: float, bias: bool) -> nn.Module:
        if len(built) == 6:
            raise NormError("no seventh")
        built.append(Doubling(shape, eps, bias))
        return built[-1]

    with pytest.raises(NormError, match="no seventh"):
        swap_norms(model, six_times)
    assert len(built) == 6
    assert swapped(model, FusedLayerNorm) == SITES


def test_the_parameters_are_the_same_objects_under_the_same_names(model: GPT2) -> None:
    model.h[1].ln_2.weight.requires_grad_(False)
    before = dict(model.named_parameters())
    swap_norms(model, "textbook")
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert list(model.state_dict()) == list(before)
    assert not model.h[1].ln_2.weight.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_there_and_back_is_the_same_model_to_the_bit(dtype: torch.dtype, device: torch.device) -> None:
    model = small_model(dtype=dtype, device=device, n_layer=3)
    ids, mask = random_ids(2, 9, device=device), left_padding((6, 9), 9, device)
    before, padded = model(ids), model(ids, mask)
    swap_norms(model, Doubling)
    assert not torch.equal(model(ids), before)
    swap_norms(model, "fused")
    assert_same_bits(model(ids), before, "after swapping back")
    assert_same_bits(model(ids, mask), padded, "after swapping back, padded")


def test_the_mode_is_kept(model: GPT2) -> None:
    model.h[1].train()
    swap_norms(model, "textbook")
    modes = {site: model.get_submodule(site).training for site in SITES}
    assert modes == {site: site.startswith("h.1.") for site in SITES}


def test_an_optimizer_goes_on_with_what_it_holds() -> None:
    """Two steps with a swap between them are two steps without one, momentum included."""
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    plain = small_model(dtype=torch.float64, **no_dropout)
    changed, ids = copy.deepcopy(plain), random_ids(2, 9)
    for model in (plain, changed):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            model(ids).square().mean().backward()
            optimizer.step()
            if model is changed:
                swap_norms(model, "textbook")
    for (name, expected), supplied in zip(plain.named_parameters(), changed.parameters(), strict=True):
        error = rms(supplied - expected) / rms(expected)
        # The gradient of a key's bias is all rounding, some 1e-17, and Adam may divide it by as little as 1e-8.
        assert_within(error, 1e-10, rms(expected), name)


@torch.no_grad()
def test_a_model_built_with_a_norm_is_one_swapped_to_it() -> None:
    ids = random_ids(2, 9)
    for norm in ("textbook", Doubling):
        swapped_to = small_model()
        swap_norms(swapped_to, norm)
        assert_same_bits(small_model(norm)(ids), swapped_to(ids), "logits")


@pytest.mark.parametrize("norm", [nn.Identity(), nn.LayerNorm(48, elementwise_affine=False)], ids=["none", "no weight"])
def test_where_there_is_no_weight_the_new_norm_starts_with_its_own(model: GPT2, norm: nn.Module) -> None:
    model.h[0].ln_1 = norm
    with pytest.raises(NormError, match=r"^h\.0\.ln_1 \(\w+\) must have a weight and a bias to fold$"):
        minigpt.fold_norms(model)
    swap_norms(model, "textbook")
    assert torch.equal(model.h[0].ln_1.weight, torch.ones(48))
    assert torch.equal(model.h[0].ln_1.bias, torch.zeros(48))


def test_a_norm_that_knows_no_bias_is_replaced_by_one_without(model: GPT2) -> None:
    model.h[0].ln_1, model.ln_f = (there := nn.RMSNorm(48)), FusedLayerNorm(48, bias=False)
    swap_norms(model, "textbook", ["h.0.ln_1", "ln_f"])
    assert model.h[0].ln_1.weight is there.weight
    assert model.h[0].ln_1.bias is model.ln_f.bias is None
    assert (model.ln_f.eps, model.ln_f.normalized_shape) == (model.config.layer_norm_epsilon, (48,))
    assert "ln_f.bias" not in model.state_dict()


def test_a_weight_that_is_computed_cannot_be_shared(model: GPT2) -> None:
    prune.l1_unstructured(model.ln_f, "weight", 0.5)
    before = dict(model.named_modules())
    with pytest.raises(NormError, match="weight or bias of ln_f is not a Parameter; undo its pruning"):
        swap_norms(model, "textbook")
    assert dict(model.named_modules()) == before
    swap_norms(model, "textbook", "h.*")


class FrozenScale(nn.LayerNorm):
    def __init__(self, *args: object, **how: object) -> None:
        super().__init__(*args, **how)
        self.weight.requires_grad_(False)


def test_a_scale_that_a_class_freezes_is_said_to_be_trained(model: GPT2, caplog: pytest.LogCaptureFixture) -> None:
    swap_norms(model, FrozenScale)
    assert caplog.messages == ["FrozenScale freezes its weight; here it is the model's, which is trained"]
    assert model.ln_f.weight.requires_grad
    caplog.clear()
    swap_norms(model, nn.LayerNorm)
    assert not caplog.messages
