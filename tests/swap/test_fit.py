"""Fitting swapped norms: what least squares gives, what the checkpoint keeps, and what cannot be fitted."""

import copy
from pathlib import Path

import pytest
import torch
from helpers import assert_close, assert_same_bits, assert_within, random_ids, small_model
from torch import Tensor, nn

import minigpt
from minigpt import GenerationError, NormError, fit_norms, swap_norms
from minigpt.swap import fit_on_text

EXACT = ["fused", "textbook", nn.LayerNorm]

USERS_OWN = """
import torch
from torch import nn

class Odd(nn.Module):
    \"\"\"Two Parameters that no other class has: a gate between two roots, and a power.\"\"\"
    def __init__(self, size, eps=1e-5):
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(2.0))
        self.power = nn.Parameter(torch.tensor(1.0))
        self.eps = eps

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        share = torch.sigmoid(self.gate)
        size = share * x.square().mean(-1, keepdim=True) + (1 - share) + self.eps
        return x / size ** self.power
"""


@pytest.fixture
def ids() -> Tensor:
    return random_ids(8, 32)


@pytest.mark.parametrize("norm", EXACT)
def test_a_layer_norm_keeps_its_parameters(norm: str, ids: Tensor) -> None:
    model = small_model(norm)
    before, expected = dict(model.named_parameters()), model(ids)
    assert all(actual == (1, 1) or min(actual) > 1 - 1e-9 for actual in fit_norms(model, ids).values())
    assert {name: id(single) for name, single in model.named_parameters()} == {
        name: id(single) for name, single in before.items()
    }
    assert_same_bits(model(ids), expected, "logits")


@pytest.mark.parametrize("norm", ["dyt", "derf", "rms", "std_eps", "frozen", nn.RMSNorm])
def test_every_site_explains_more_and_swapping_back_restores_the_bits(norm: str, ids: Tensor) -> None:
    model = small_model()
    expected, before = model(ids).detach(), dict(model.named_parameters())
    swap_norms(model, norm)
    actual = fit_norms(model, ids)
    assert list(actual) == model.site_names()
    print(actual)
    assert all(one.before <= one.after <= 1 for one in actual.values())
    assert all(model.get_submodule(site).weight is not before[f"{site}.weight"] for site in actual)
    model.double().float()  # as a move to another device does, this replaces what the norms hold
    swap_norms(model, "fused")
    assert_same_bits(model(ids).detach(), expected, "after swapping back")
    assert dict(model.named_parameters()).keys() == before.keys()


@torch.no_grad()
def test_scale_and_shift_are_the_least_squares(ids: Tensor) -> None:
    """By the normal equations of each channel, at the first site, where both models see the same input."""
    model = small_model(dtype=torch.float64)
    x = model.wte(ids) + model.wpe(torch.arange(32))
    expected = model.h[0].ln_1(x).flatten(0, 1)
    swap_norms(model, "rms")
    fit_norms(model, ids, "h.0.ln_1")
    bare = (x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(0, 1)
    for channel in range(48):
        rows = torch.stack([bare[:, channel], torch.ones(256, dtype=torch.float64)], dim=1)
        scale, shift = torch.linalg.lstsq(rows, expected[:, channel]).solution
        assert_within(abs(model.h[0].ln_1.weight[channel] - scale).item(), 1e-10, 1.0, "scale")
        assert_within(abs(model.h[0].ln_1.bias[channel] - shift).item(), 1e-10, 1.0, "shift")


@pytest.mark.parametrize("alpha", [0.5, 50.0])
def test_alpha_is_found_from_far_away(alpha: float, ids: Tensor) -> None:
    """No alpha of a grid around the found one explains more, with its own best scale and shift."""
    model = small_model("dyt", dtype=torch.float64)
    with torch.no_grad():
        model.h[0].ln_1.alpha.fill_(alpha)
    after = fit_norms(model, ids, "h.0.ln_1")["h.0.ln_1"].after
    best = model.h[0].ln_1.alpha.item()
    x = (model.wte(ids) + model.wpe(torch.arange(32))).detach()
    swap_norms(model, "fused", "h.0.ln_1")
    expected = model.h[0].ln_1(x).detach().flatten(0, 1)
    for factor in torch.logspace(-1, 1, 21).tolist():
        u = torch.tanh(best * factor * x).flatten(0, 1)
        du, dy = u - u.mean(0), expected - expected.mean(0)
        explained = ((du * dy).sum(0).square() / du.square().sum(0)).sum() / dy.square().sum()
        assert explained.item() <= after + 1e-6


def test_frozen_norms_are_fitted_again_as_at_first(ids: Tensor) -> None:
    model, others = small_model("frozen"), random_ids(8, 32)
    fit_norms(model, others)
    fit_norms(model, ids)
    fresh = small_model("frozen")
    fit_norms(fresh, ids)
    for name, single in model.state_dict().items():
        assert_close(single.nan_to_num(), fresh.state_dict()[name].nan_to_num(), 1e-5, name)


def test_only_the_chosen_sites_are_fitted(ids: Tensor) -> None:
    model = small_model("dyt")
    before = {name: single.detach().clone() for name, single in model.named_parameters()}
    assert list(fit_norms(model, ids, ["ln_f", "h.1.*"])) == ["h.1.ln_1", "h.1.ln_2", "ln_f"]
    changed = {name for name, single in model.named_parameters() if not torch.equal(single, before[name])}
    assert {name.rpartition(".")[0] for name in changed} == {"h.1.ln_1", "h.1.ln_2", "ln_f"}


def test_it_reads_in_eval_mode_and_leaves_the_mode_as_it_was(ids: Tensor) -> None:
    model = small_model("dyt", embd_pdrop=0.5)
    calm = fit_norms(copy.deepcopy(model), ids)
    model.train()
    model.h[0].eval()
    before = [part.training for part in model.modules()]
    assert fit_norms(model, ids) == calm
    assert [part.training for part in model.modules()] == before


class Tanh(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


@torch.no_grad()
def test_a_class_without_parameters_keeps_and_fits_scale_and_shift_beside_it(ids: Tensor) -> None:
    model = small_model(Tanh)
    actual = fit_norms(model, ids)
    assert all(one.after > one.before for one in actual.values())
    swap_norms(model, Tanh, keep=())
    with pytest.raises(NormError, match=r"h\.0\.ln_1 \(Tanh\) has no Parameters to fit; keep its scale and shift"):
        fit_norms(model, ids)


@torch.no_grad()
def test_a_user_s_class_is_fitted_saved_and_read(tmp_path: Path, ids: Tensor) -> None:
    (tmp_path / "odd.py").write_text(USERS_OWN)
    norm = f"{tmp_path / 'odd.py'}:Odd"
    model = minigpt.from_pretrained("demo", norm=norm, device="cpu")
    actual = fit_norms(model, ids)
    assert all(one.after > max(one.before, 0.99) for one in actual.values()), "at power 1/2 and gate 1 it is LayerNorm"
    minigpt.save_pretrained(model, tmp_path / "saved")
    again = minigpt.from_pretrained(tmp_path / "saved", norm=norm, device="cpu")
    assert_same_bits(again(ids), model(ids), "read again")
    for _ in range(2):  # as the checkpoint has it, and swapped
        with pytest.raises(NormError, match=r"h\.0\.ln_1 .*: the checkpoint has .*:Odd there, and no LayerNorm"):
            fit_norms(again, ids)
        swap_norms(again, "dyt")
    again = minigpt.from_pretrained(tmp_path / "saved", norm=norm, device="cpu")
    assert_same_bits(again.ln_f.norm.power, model.ln_f.norm.power, "power")


@torch.no_grad()
def test_folding_and_copying_keep_what_was_fitted(ids: Tensor) -> None:
    model = small_model("dyt", dtype=torch.float64)
    fit_norms(model, ids)
    expected = model(ids)
    minigpt.fold_norms(model)
    assert_close(model(ids), expected, 1e-12, "folded")
    swap_norms(model, "dyt")  # a folded model goes on with its folded scale, not with the checkpoint's
    assert_close(model.h[0].ln_1.weight, torch.ones(48).double(), 0, "scale")


class OfTheBatch(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean((0, 1))) * self.weight


def test_what_cannot_be_fitted_is_said_and_changes_nothing(ids: Tensor, tmp_path: Path) -> None:
    model = small_model("dyt")
    before = {name: single.clone() for name, single in model.state_dict().items()}
    with pytest.raises(NormError, match=r"must have at least 64 tokens to fit norms on, .* got \(1, 63\)"):
        fit_norms(model, ids.view(1, -1)[:, :63])
    with pytest.raises(GenerationError, match="outside the vocabulary"):
        fit_norms(model, torch.full((8, 8), 83))
    swap_norms(model, OfTheBatch, "ln_f")
    with pytest.raises(NormError, match=r"ln_f \(OfTheBatch\) cannot be fitted: its output depends on the batch"):
        fit_norms(model, ids)
    swap_norms(model, "fused", "ln_f")
    for name, single in model.state_dict(keep_vars=True).items():
        assert torch.equal(single, before[name]), name
    (tmp_path / "short").write_text("Once upon a time.")
    demo = minigpt.from_pretrained("demo", norm="dyt", device="cpu")
    with pytest.raises(NormError, match=r"short must have at least 64 tokens, got \d"):
        fit_on_text(demo, minigpt.Tokenizer.from_pretrained("demo"), tmp_path / "short")
    with torch.no_grad():
        model.wte.weight[0] = float("nan")
    with pytest.raises(NormError, match="depends on the batch or is not finite"):
        fit_norms(model, torch.zeros(8, 8, dtype=torch.long))


@torch.no_grad()
def test_what_is_fitted_on_the_command_line_is_saved_and_served(tmp_path: Path) -> None:
    from minigpt.cli.convert import convert
    from minigpt.serve import open_models

    (tmp_path / "text").write_text("Once upon a time there was a young gardener named Tom. " * 60)
    fitted, ids = {"norm": "dyt", "fit": tmp_path / "text"}, random_ids(2, 20)
    model = minigpt.from_pretrained("demo", norm="dyt", device="cpu")
    fit_on_text(model, minigpt.Tokenizer.from_pretrained("demo"), tmp_path / "text")
    convert(minigpt.Recipe(**fitted), tmp_path / "saved")
    assert_same_bits(minigpt.from_pretrained(tmp_path / "saved", device="cpu")(ids), model(ids), "saved")
    served, _ = open_models([minigpt.Recipe(device="cpu"), minigpt.Recipe(device="cpu", **fitted)])
    assert_same_bits(served["demo:dyt"](ids), model(ids), "served")
    assert_same_bits(served["demo"](ids), minigpt.from_pretrained("demo", device="cpu")(ids), "the model beside it")


@pytest.mark.parametrize("words", ["short must have at least 64 tokens, got 4", "short needs a tokenizer"])
def test_a_text_to_fit_on_is_refused_before_a_model_is_read(words: str, folder: Path, tmp_path: Path) -> None:
    text, steps = tmp_path / "short", list[str]()
    text.write_text("Once upon a time")
    source = folder if "tokenizer" in words else "demo"
    recipe = minigpt.Recipe(source, norm="dyt", fit=text, device="cpu")
    with pytest.raises(minigpt.MiniGPTError, match=words):
        minigpt.parity(recipe, progress=lambda step, done: steps.append(step))
    assert len(steps) == 1  # which says that it begins
    with pytest.raises(minigpt.MiniGPTError, match=words):
        recipe.load()
