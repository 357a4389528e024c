"""Models whose norms, caches or modules are not laid out as Llama's are."""

from typing import Any

import pytest
import torch
from architectures import random_model
from torch import Tensor, nn

import minigpt

PROMPTS = [[5, 6, 7, 8, 9, 10], [40, 41, 3, 7, 60, 61, 62, 63], [11, 90, 17]]
IDS = torch.tensor(PROMPTS[:1])


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function of an architecture's name that returns its model and its original."""
    kept: dict[str, tuple[Any, minigpt.Original]] = {}

    def read(name: str) -> tuple[Any, minigpt.Original]:
        if name not in kept:
            folder = tmp_path_factory.mktemp(name)
            model = random_model(name)
            model.save_pretrained(folder)
            kept[name] = model, minigpt.Original(folder, device="cpu", prompts=PROMPTS, max_new_tokens=4)
        return kept[name]

    return read


@pytest.mark.parametrize(
    ("name", "site"),
    [
        ("nanochat", "model.norm"),  # it is behind the embedding too
        ("nanochat", "model.layers.1.self_attn.q_norm"),
        ("hrm_text", "model.L_module.layers.1.input_layernorm"),  # it is called four times
        ("hrm_text", "model.H_module.final_norm"),
    ],
)
def test_a_wrong_norm_is_found_where_modules_are_called_again(name: str, site: str, original: Any) -> None:
    model, truth = original(name)
    norm = model.get_submodule(site)
    role = "eps" if hasattr(norm, "eps") else "variance_epsilon"
    before = getattr(norm, role)
    setattr(norm, role, 0.5)
    try:
        report = truth.judge(model, diagnose=False)
    finally:
        setattr(norm, role, before)
    assert report.outcome == "FAIL"
    assert report.first_off.place == site
    assert truth.judge(model).outcome == "PASS"


@pytest.mark.parametrize("name", ["minimax", "deepseek_v4"])
def test_a_model_makes_its_own_kind_of_cache(name: str, original: Any) -> None:
    """MiniMax takes no DynamicCache. DeepSeek V4 compresses keys, and a norm of these has a row for several tokens."""
    model, truth = original(name)
    report = truth.judge(model)
    assert report.outcome == "PASS"
    assert report.decoding is not None
    assert report.every_place
    continued = model.generate(IDS, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert truth.truth.prompts[0].ids == continued[0].tolist()


class Logits(nn.Module):
    """A model as a function of ids to logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids, use_cache=False).logits


@pytest.mark.parametrize("as_modules", [False, True])
def test_modules_of_torch_export_are_judged_by_their_logits(as_modules: bool, original: Any) -> None:
    """They refuse ``eval``. As modules, a norm lists its input beside its output where both are used later."""
    model, truth = original("llama")
    tokens = torch.export.Dim("tokens", min=2, max=40)
    program = torch.export.export(Logits(model), (IDS,), dynamic_shapes=({1: tokens},), strict=False)
    exported = torch.export.unflatten(program) if as_modules else program.module()
    modes = [part.training for part in exported.modules()]
    report = truth.judge(exported)
    assert report.outcome == "PASS"
    assert not any(site.propagated_error > 1e-5 for site in report.norm_sites)
    assert not report.notes
    assert [part.training for part in exported.modules()] == modes
